"""Tasks: data, split once and for all, with the test set behind one method."""
