"""Models, their stage functions, optimizers and data.

Files here are pure JAX and Flax, with numpy for data. They import jaxdt.run, which has the models' options in
jaxdt/run/families. The functions of a family are in the file of its name in jaxdt/model/families, those of a module of
one's own behind jaxdt.model.own_model; jaxdt.model.derive reads facts off them. jaxdt.model.optim has the table of
optimizers.
"""
