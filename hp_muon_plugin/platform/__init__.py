"""CPU, CUDA and NPU behind one protocol."""
