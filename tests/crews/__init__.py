"""What processes of tests do as ranks of a job.

A package by name, so that no other module called so is taken for it, wherever tests look for one.
"""
