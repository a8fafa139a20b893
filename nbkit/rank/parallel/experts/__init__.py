"""The torch half of ep=: experts of a mixture that are spread over ranks."""
