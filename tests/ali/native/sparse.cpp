// Sparse matrices in the C++ layer.
#include <alchemist.hpp>

using alchemist::Call, alchemist::Matrix, alchemist::Sparse;

static std::tuple<Sparse<double>, Matrix<double>> scaled(Call &call, Sparse<const double> A,
                                                         double factor) {
    auto B = call.sparse<double>(A.rows(), A.cols(), A.local_elements());
    auto sums = call.vector<double>(A.rows(), ALCHEMIST_ROW_BLOCKS);
    for (int64_t i = 0; i <= A.local_rows(); i++) B.set_start(i, A.start(i));
    for (int64_t i = 0; i < A.local_rows(); i++)
        for (int64_t k = A.start(i); k < A.start(i + 1); k++) {
            B.set_column(k, A.column(k));
            B[k] = factor * A[k];
            sums(i, 0) += A[k];
        }
    return {B, sums};
}

ALCHEMIST_CPP_LIBRARY("sparse_in_cpp", "Sparse matrices in C++.") {
    library.routine<scaled>("scaled", "B = factor * A, and sums of rows.",
                            {{"A", "of float64"}, {"factor", "the factor", "2.0"}},
                            {{"B", "factor * A"}, {"sums", "of rows of A"}});
}
