"""One file for each family of models, with a MODEL (jaxdt.model.base). May import what jaxdt.model may; nothing but the
table names a file in here."""
