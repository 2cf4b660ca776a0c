"""Random use of the system for a given time, with a look at what has grown."""
