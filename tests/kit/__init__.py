"""What tests share: doubles and stubs, processes and ranks, states, and acts on checkpoints."""
