"""What several kernels share: devices, launching, tile sizes, tiles, and the random stream in Triton."""
