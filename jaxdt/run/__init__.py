"""Values that say what a run is: config, model facts, plan, network, profile, memory, codec names, kinds of Work.

Files here check fields, one by one, and compute sizes. They import the standard library and one another, nothing else.
Which kinds of wiring and sync exist, and which combinations make sense, is decided above, in jaxdt.build.
"""
