"""Objects in images, each with a class and a box: COCO's files, made-up images, losses, metrics."""
