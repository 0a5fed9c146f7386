"""The generated tables of the documentation: a module for each page that has some."""
