"""Memory of devices: order among streams, GPUDirect Storage, and what comes of refusals."""
