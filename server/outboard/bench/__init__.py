"""`outboard bench`: how many answers a second, and how soon, over HTTP as a client sees it."""
