"""What regularised attention costs on a machine: the operator by shape, and whole training steps."""
