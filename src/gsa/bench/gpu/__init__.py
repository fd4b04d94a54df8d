"""What can be said of the GPU kernels, with a GPU (`ops`) and without one (`kernels`, `traffic`)."""
