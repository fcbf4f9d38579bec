"""A state taken apart and put back, whatever it consists of."""
