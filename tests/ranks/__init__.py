"""What ranks tell each other: all agree or all fail, and every wait ends."""
