"""Names of libraries, of routines with a meaning of their own, and of functions in linalg's."""

SHIPPED = {  # names, and the ranks' modules
    "linalg": "ali.linalg",
    "scalapack": "ali.scalapack",
    "elemental": "ali.elemental",
    "files": "ali.files",
    "sparse": "ali.sparse",
    "petsc": "ali.petsc",
    "slepc": "ali.petsc.slepc",
    "simulator": "ali.simulator",
    "program": "ali.executables.stepped_program",
    "hpc": "ali.hpc",
    "echo": "ali.echo",
}
ARRAYS = "ali.arrays"  # linalg under another name: a library `linalg` of the user is left alone
# Results of the first are arguments of the second: so the state of a library outlives its ranks.
SAVE_STATE = "save_state"
LOAD_STATE = "load_state"
ENTRY_POINTS = "alchemist.libraries"  # the group in which packages name their libraries

# Warnings of NumPy's reductions, in replies beside NumPy's four flags of floating-point errors.
SLICE_WARNINGS = {
    "Mean of empty slice": 16, "Degrees of freedom <= 0 for slice": 32,
    "All-NaN slice encountered": 64,
}  # fmt: skip
# The functions of linalg's `elementwise` and `apply`: NumPy's of these names.
BINARY = frozenset({
    "add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power", "minimum",
    "maximum", "arctan2", "hypot", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_xor", "left_shift", "right_shift", "logaddexp", "copysign", "nextafter",
    "fmin", "fmax", "fmod", "float_power",
})  # fmt: skip
UNARY = frozenset({
    "negative", "abs", "sign", "conj", "square", "sqrt", "reciprocal", "exp",
    "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "arcsin", "arccos", "arctan",
    "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "floor", "ceil", "trunc", "rint",
    "isnan", "isinf", "isfinite", "signbit", "logical_not",
    "invert", "cbrt", "exp2", "degrees", "radians", "fabs",
})  # fmt: skip
PARTS = frozenset({"real", "imag"})  # functions of one operand as well, but not ufuncs in NumPy
# Those of scipy.special, which the client's process may not have.
SPECIAL_BINARY = frozenset({
    "beta", "betaln", "binom", "gammainc", "gammaincc", "huber", "jv", "kl_div", "rel_entr",
    "xlog1py", "xlogy",
})  # fmt: skip
SPECIAL_UNARY = frozenset({
    "entr", "erf", "erfc", "erfcinv", "erfcx", "erfinv", "exp1", "exp10", "expi", "expit", "gamma",
    "gammaln", "i0", "i0e", "i1", "i1e", "j0", "j1", "k0", "k1", "log_expit", "log_ndtr", "logit",
    "loggamma", "ndtr", "ndtri", "psi", "rgamma", "y0", "y1",
})  # fmt: skip
