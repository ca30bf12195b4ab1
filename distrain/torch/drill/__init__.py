"""What ``distrain drill`` knows of torch: the state of a training, the tensors in a checkpoint. Runs in: anywhere."""
