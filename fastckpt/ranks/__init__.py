"""The messages and agreements between the ranks of a job."""
