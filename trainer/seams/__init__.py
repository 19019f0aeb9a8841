"""What a user of the trainer may replace, one file each: model, loss, data, optimizer, step. Imports nothing of the trainer."""
