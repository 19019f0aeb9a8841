"""What `titan-ckpt doctor` examines: this machine, its torch, a store."""
