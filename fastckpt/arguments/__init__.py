"""Checks of arguments, and conversion of sizes, rates and names from and to text."""
