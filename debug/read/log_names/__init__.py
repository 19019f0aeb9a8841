"""What the paths of logs say of their writers."""
