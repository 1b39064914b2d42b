"""What is played: requests, machines, weather and faults, drawn from a seed."""
