"""`outboard plan`: the real engine in virtual time, on a machine that need not exist."""
