"""The records that a training writes to disk, code that reads them, and figures that are computed from them."""
