"""The options of each family of models, one file a family; its functions are in the file of the same name in
jaxdt/model/families."""
