"""The gateway itself: runs on the head of a Ray cluster."""
