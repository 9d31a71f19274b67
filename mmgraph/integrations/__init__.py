"""mmgraph inside other libraries' models. Each is imported where it is used."""
