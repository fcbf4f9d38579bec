"""What takes long: statistics, storms and scripts that measure how often something fails."""
