"""`outboard profile`: what a model costs on a device, measured by a worker of its own, and the batch size that follows."""
