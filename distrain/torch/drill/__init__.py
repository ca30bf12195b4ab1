"""The part of ``distrain drill`` for torch: the state of a training, the tensors in a checkpoint. Runs in: anywhere."""
