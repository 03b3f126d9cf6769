"""Operations with a backward pass written by hand, each with its formulas in its doc string."""
