"""Servers of object stores, what lies between them and a client, and states for them."""
