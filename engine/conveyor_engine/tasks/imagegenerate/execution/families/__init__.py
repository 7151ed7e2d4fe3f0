"""How the parts of each layout make pictures together, as in diffusers' pipeline of the same name."""
