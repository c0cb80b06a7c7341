"""The compiled CPU kernels (csrc/): the library, and its functions as torch operators."""
