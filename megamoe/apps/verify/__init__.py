"""`megamoe verify`: a run made small, compared under many layouts with one rank."""
