"""Who is stuck where: what every rank does is collected, and one sentence says what it comes to."""
