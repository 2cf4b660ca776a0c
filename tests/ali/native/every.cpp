// The same for the C++ layer: every type there and back, state, exceptions.
#include <alchemist.hpp>

using alchemist::Call, alchemist::Matrix;
template <class T> using List = std::vector<T>;

static std::tuple<Matrix<const double>, int64_t, double, std::complex<double>, bool, std::string,
                  List<int64_t>, List<double>, List<bool>, List<std::string>>
echo(Call &, Matrix<const double> A, int64_t i, double x, std::complex<double> z, bool flag,
     const std::string &text, List<int64_t> ints, List<double> floats, List<bool> flags,
     List<std::string> texts) {
    return {A, i, x, z, flag, text, ints, floats, flags, texts};
}

static std::tuple<bool, int> optional(Call &, std::optional<Matrix<const double>> A,
                                      std::optional<int> i) {
    return {A.has_value(), i.value_or(-1)};
}

struct State {
    int64_t calls = 0;
};

static std::tuple<Matrix<bool>, Matrix<bool>> negative(Call &call, Matrix<const double> A) {
    auto rows = call.vector<bool>(A.rows(), A.layout());
    auto B = call.zeros<bool>(A.rows(), A.cols(), A.layout());
    for (int64_t j = 0; j < A.local_cols(); j++)
        for (int64_t i = 0; i < A.local_rows(); i++) B(i, j) = A(i, j) < 0;
    for (int64_t i = 0; i < rows.local_rows() * rows.local_cols(); i++)
        rows(i, 0) = rows.global_row(i) % 2 == 0;
    return {B, rows};
}

static Matrix<bool> inverted(Call &call, Matrix<const bool> mask) {
    auto B = call.like(mask);
    for (int64_t j = 0; j < mask.local_cols(); j++)
        for (int64_t i = 0; i < mask.local_rows(); i++) B(i, j) = !mask(i, j);
    return B;
}

static void grow(Call &, Matrix<double> A, std::complex<double> factor) {
    for (int64_t j = 0; j < A.local_cols(); j++)
        for (int64_t i = 0; i < A.local_rows(); i++) A(i, j) *= factor.real();
}

static int64_t count(Call &call) { return ++call.state<State>().calls; }

static void fail(Call &call, int rank, const std::string &how) {
    if (rank == -1 || rank == call.rank()) {
        if (how == "refuse") throw alchemist::Refused("no such luck");
        if (how == "odd") throw 5;
        throw std::runtime_error("no luck: " + how);
    }
    double x = 1;
    call.allreduce(&x, &x, 1, MPI_DOUBLE, MPI_SUM);
}

static void work(Call &call, double seconds) {
    double until = MPI_Wtime() + seconds;
    while (MPI_Wtime() < until) call.check();
}

static Matrix<std::complex<float>> fill(Call &call, int64_t m, int64_t n) {
    auto A = call.zeros<std::complex<float>>(m, n, ALCHEMIST_MC_MR);
    for (int64_t j = 0; j < A.local_cols(); j++)
        for (int64_t i = 0; i < A.local_rows(); i++)
            A(i, j) = {float(A.global_row(i)), float(A.global_col(j))};
    return A;
}

ALCHEMIST_CPP_LIBRARY("every", "Everything that the C++ layer can do.") {
    library.routine<echo>("echo", "Everything back.",
                          {{"A"}, {"i", "", "3"}, {"x", "", "0.5"}, {"z", "", "1.5"},
                           {"flag", "", "true"}, {"text", "", "\"hello\""}, {"ints", "", "[1, 2]"},
                           {"floats", "", "[]"}, {"flags", "", "[true, false]"},
                           {"texts", "", "[\"a\", \"b\"]"}},
                          {{"A"}, {"i"}, {"x"}, {"z"}, {"flag"}, {"text"}, {"ints"}, {"floats"},
                           {"flags"}, {"texts"}});
    library.routine<optional>("optional", "Which arguments were given.", {{"A"}, {"i"}},
                              {{"given"}, {"i"}});
    library.routine<negative>("negative", "A < 0, and a vector of even rows.", {{"A"}},
                              {{"B"}, {"rows"}});
    library.routine<inverted>("inverted", "Not mask.", {{"mask"}}, {{"B"}});
    library.routine<grow>("grow", "A = factor A, in place.", {{"A"}, {"factor", "", "[2, 0]"}});
    library.routine<count>("count", "How often it was called.", {}, {{"calls"}});
    library.routine<fail>("fail", "Fails on a rank, or on all.",
                          {{"rank", "", "-1"}, {"how", "", "\"really\""}});
    library.routine<work>("work", "Works for so long.", {{"seconds", "", "0.02"}});
    library.routine<fill>("fill", "i + j * sqrt(-1).", {{"m"}, {"n"}}, {{"A"}});
}
