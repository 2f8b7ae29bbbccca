"""The generated parts of the documentation, one module for each page or picture."""
