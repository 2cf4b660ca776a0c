// The Alchemist-Library Interface for C++17, header only, over alchemist.h.
//
//     #include <alchemist.hpp>
//     using alchemist::Call, alchemist::Matrix;
//
//     Matrix<double> scale(Call &call, Matrix<const double> A, double factor) {
//         auto B = call.like(A);
//         for (int64_t j = 0; j < A.local_cols(); j++)
//             for (int64_t i = 0; i < A.local_rows(); i++) B(i, j) = factor * A(i, j);
//         return B;
//     }
//     ALCHEMIST_CPP_LIBRARY("mylib", "Purpose of the library.") {
//         library.routine<scale>("scale", "B = factor * A.",
//                                {{"A", "of float64"}, {"factor", "the factor", "2.0"}}, {{"B"}});
//     }
//
// Types of parameters and results are those of the function: Matrix<T>, integers, double, bool,
// std::string, std::complex<double>, std::vector of int64_t, double, bool or std::string; a
// parameter may be std::optional of any of them (its default is then "null"); several results are
// a std::tuple. An exception fails the call with its what(); alchemist::Refused: a bad argument.
#ifndef ALCHEMIST_HPP
#define ALCHEMIST_HPP

#include <algorithm>
#include <array>
#include <complex>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "alchemist.h"

namespace alchemist {

// Thrown when the call has failed on another rank or was cancelled. Do not catch it.
struct Ended {};

// Thrown when a function of the host has failed; the host reports the cause. Do not catch it.
struct HostFailed {};

// Bad arguments (BadArgumentError). Throw it on all ranks, from values that all ranks see.
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <class T> struct dtype_of;
#define ALCHEMIST_DTYPE_OF(T, DTYPE, MPI)                  \
    template <> struct dtype_of<T> {                       \
        static constexpr auto value = DTYPE;               \
        static MPI_Datatype mpi() { return MPI; }          \
    }
ALCHEMIST_DTYPE_OF(float, ALCHEMIST_FLOAT32, MPI_FLOAT);
ALCHEMIST_DTYPE_OF(double, ALCHEMIST_FLOAT64, MPI_DOUBLE);
ALCHEMIST_DTYPE_OF(std::complex<float>, ALCHEMIST_COMPLEX64, MPI_C_FLOAT_COMPLEX);
ALCHEMIST_DTYPE_OF(std::complex<double>, ALCHEMIST_COMPLEX128, MPI_C_DOUBLE_COMPLEX);
ALCHEMIST_DTYPE_OF(int32_t, ALCHEMIST_INT32, MPI_INT32_T);
ALCHEMIST_DTYPE_OF(int64_t, ALCHEMIST_INT64, MPI_INT64_T);
ALCHEMIST_DTYPE_OF(bool, ALCHEMIST_BOOL8, MPI_C_BOOL);
ALCHEMIST_DTYPE_OF(int8_t, ALCHEMIST_INT8, MPI_INT8_T);
ALCHEMIST_DTYPE_OF(int16_t, ALCHEMIST_INT16, MPI_INT16_T);
ALCHEMIST_DTYPE_OF(uint8_t, ALCHEMIST_UINT8, MPI_UINT8_T);
ALCHEMIST_DTYPE_OF(uint16_t, ALCHEMIST_UINT16, MPI_UINT16_T);
ALCHEMIST_DTYPE_OF(uint32_t, ALCHEMIST_UINT32, MPI_UINT32_T);
ALCHEMIST_DTYPE_OF(uint64_t, ALCHEMIST_UINT64, MPI_UINT64_T);
#undef ALCHEMIST_DTYPE_OF

inline const char *name_of(alchemist_dtype dtype) {
    static const char *names[] = {"?", "float32", "float64", "complex64", "complex128", "int32",
                                  "int64", "bool", "int8", "int16", "uint8", "uint16", "uint32",
                                  "uint64", "float16"};
    return names[dtype];
}

// A view of one rank's part of a matrix, column-major. T is const for parameters.
template <class T> class Matrix {
  public:
    explicit Matrix(const alchemist_matrix *raw) : raw_(raw) {
        constexpr auto wanted = dtype_of<std::remove_const_t<T>>::value;
        if (raw->dtype != wanted)
            throw Refused(std::string("it takes a matrix of ") + name_of(wanted) + ", not of " +
                          name_of(raw->dtype));
    }
    int64_t rows() const { return raw_->rows; } // of the whole
    int64_t cols() const { return raw_->cols; }
    int dimensions() const { return raw_->dimensions; } // 1: a vector, stored as one column
    int64_t local_rows() const { return raw_->local_rows; }
    int64_t local_cols() const { return raw_->local_cols; }
    int64_t leading_dimension() const { return raw_->leading_dimension; }
    alchemist_layout layout() const { return raw_->layout; }
    int64_t global_row(int64_t i) const { return alchemist_global_row(raw_, i); }
    int64_t global_col(int64_t j) const { return alchemist_global_col(raw_, j); }
    // ScaLAPACK's, see alchemist_descriptor.
    std::array<int, 9> descriptor(int context) const {
        std::array<int, 9> found;
        if (alchemist_descriptor(raw_, context, found.data()) != ALCHEMIST_OK)
            throw Refused("ScaLAPACK has no descriptor of this matrix: use to_layout with "
                          "ALCHEMIST_BLOCK_CYCLIC(64)");
        return found;
    }
    T *data() const { return static_cast<T *>(raw_->data); }
    T *column(int64_t j) const { return data() + j * raw_->leading_dimension; }
    T &operator()(int64_t i, int64_t j) const { return column(j)[i]; } // local indices
    const alchemist_matrix *raw() const { return raw_; }

  private:
    const alchemist_matrix *raw_;
};

// One rank's rows of a sparse matrix, in CSR with global columns: the rows that it has of a dense
// matrix in ALCHEMIST_ROW_BLOCKS. One of Call::sparse is filled on each rank, others are read-only.
template <class T> class Sparse {
  public:
    explicit Sparse(const alchemist_sparse *raw) : raw_(raw) {
        constexpr auto wanted = dtype_of<std::remove_const_t<T>>::value;
        if (raw->dtype != wanted)
            throw Refused(std::string("it takes a sparse matrix of ") + name_of(wanted) +
                          ", not of " + name_of(raw->dtype));
    }
    int64_t rows() const { return raw_->rows; } // of the whole
    int64_t cols() const { return raw_->cols; }
    int64_t elements() const { return raw_->elements; } // on all ranks
    int64_t first_row() const { return raw_->first_row; }
    int64_t local_rows() const { return raw_->local_rows; }
    int64_t local_elements() const { return raw_->local_elements; }
    // Elements start(i) to start(i + 1) are in local row i.
    int64_t start(int64_t i) const { return alchemist_start(raw_, i); }
    int64_t column(int64_t k) const { return alchemist_column(raw_, k); }
    void set_start(int64_t i, int64_t k) const { alchemist_set_start(raw_, i, k); }
    void set_column(int64_t k, int64_t j) const { alchemist_set_column(raw_, k, j); }
    T *data() const { return static_cast<T *>(raw_->data); }
    T &operator[](int64_t k) const { return data()[k]; }
    const alchemist_sparse *raw() const { return raw_; }

  private:
    const alchemist_sparse *raw_;
};

namespace detail {

// A message under way, with its memory.
struct Message {
    MPI_Request raw = MPI_REQUEST_NULL;
    std::shared_ptr<void> memory;
    std::function<void()> done;
};
// Messages of calls that ended early, until MPI has finished with their memory.
inline std::vector<std::unique_ptr<Message>> &unfinished() {
    static auto *list = new std::vector<std::unique_ptr<Message>>; // outlives the process's end
    return *list;
}
inline void release_finished() {
    auto done = [](const std::unique_ptr<Message> &message) {
        int finished = 0;
        return MPI_Test(&message->raw, &finished, MPI_STATUS_IGNORE) == MPI_SUCCESS && finished;
    };
    auto &list = unfinished();
    list.erase(std::remove_if(list.begin(), list.end(), done), list.end());
}
struct Dropped {
    void operator()(Message *message) const {
        std::unique_ptr<Message> held(message);
        if (held->raw != MPI_REQUEST_NULL) unfinished().push_back(std::move(held));
    }
};

} // namespace detail

// Memory for messages, without a copy. Copies of a Buffer share the memory.
template <class T> class Buffer {
  public:
    explicit Buffer(size_t count) : items_(std::make_shared<std::vector<T>>(count)) {}
    explicit Buffer(std::vector<T> items)
        : items_(std::make_shared<std::vector<T>>(std::move(items))) {}
    T *data() const { return items_->data(); }
    size_t size() const { return items_->size(); }
    T &operator[](size_t i) const { return (*items_)[i]; }
    T *begin() const { return data(); }
    T *end() const { return data() + size(); }

  private:
    friend class Call;
    std::shared_ptr<std::vector<T>> items_;
};

// A message under way. An exception that unwinds the routine may drop it: its memory is kept until
// MPI has finished with it.
class Request {
    friend class Call;
    std::unique_ptr<detail::Message, detail::Dropped> message_{new detail::Message};
};

namespace detail {

struct Holder { virtual ~Holder() = default; };
template <class S> struct Held final : Holder {
    S value{};
};

} // namespace detail

// A part of a routine, from its construction to its destruction: Call::span.
struct SpanEnd {
    void operator()(alchemist_call *call) const { alchemist_span_end(call); }
};
using Span = std::unique_ptr<alchemist_call, SpanEnd>;

// A call of a routine, on this rank.
class Call {
  public:
    explicit Call(alchemist_call *raw) : raw_(raw) {}
    MPI_Comm comm() const { return raw_->comm; }
    int rank() const { return raw_->rank; }
    int size() const { return raw_->size; }
    int grid_height() const { return raw_->grid_height; }
    int grid_width() const { return raw_->grid_width; }
    alchemist_call *raw() const { return raw_; }

    // A distributed matrix of zeros; every rank passes the same arguments.
    template <class T>
    Matrix<T> zeros(int64_t rows, int64_t cols, alchemist_layout layout = ALCHEMIST_VC_STAR) {
        constexpr auto dtype = dtype_of<std::remove_const_t<T>>::value;
        return Matrix<T>(checked(alchemist_new(raw_, rows, cols, dtype, layout)));
    }
    // A vector of zeros: one column, which clients get with the shape (rows,).
    template <class T>
    Matrix<T> vector(int64_t rows, alchemist_layout layout = ALCHEMIST_VC_STAR) {
        constexpr auto dtype = dtype_of<std::remove_const_t<T>>::value;
        return Matrix<T>(checked(alchemist_new_vector(raw_, rows, dtype, layout)));
    }
    // A sparse matrix; every rank passes the same shape, and the number of its own elements.
    template <class T> Sparse<T> sparse(int64_t rows, int64_t cols, int64_t local_elements) {
        constexpr auto dtype = dtype_of<std::remove_const_t<T>>::value;
        return Sparse<T>(checked(alchemist_new_sparse(raw_, rows, cols, local_elements, dtype)));
    }
    template <class T> Matrix<std::remove_const_t<T>> like(const Matrix<T> &matrix) {
        return Matrix<std::remove_const_t<T>>(checked(alchemist_new_like(raw_, matrix.raw())));
    }
    // The matrix in another layout; the same matrix if it has that layout. Collective.
    template <class T>
    Matrix<const std::remove_const_t<T>> to_layout(const Matrix<T> &matrix,
                                                   alchemist_layout layout) {
        return Matrix<const std::remove_const_t<T>>(
            checked(alchemist_to_layout(raw_, matrix.raw(), layout)));
    }
    // The library's state on this rank, default-constructed at first use.
    template <class S> S &state() {
        if (raw_->state == nullptr)
            raw_->state = static_cast<detail::Holder *>(new detail::Held<S>());
        auto *held = dynamic_cast<detail::Held<S> *>(static_cast<detail::Holder *>(raw_->state));
        if (held == nullptr) throw std::logic_error("the library's state has another type");
        return held->value;
    }
    void check() const { ended(alchemist_check(raw_)); }
    // A part of the routine for als.trace, until the object is destroyed:
    // alchemist::Span part = call.span("assemble");
    [[nodiscard]] Span span(const std::string &name) const {
        alchemist_span_begin(raw_, name.c_str());
        return Span(raw_);
    }
    void progress(double fraction, const std::string &text = "") const {
        alchemist_progress(raw_, fraction, text.c_str());
    }
    // Messages over comm(), whose waits end when the call has failed elsewhere or was cancelled. A
    // vector is copied, a Buffer is not. A vector that is received must live until the wait.
    template <class T> Request isend(const Buffer<T> &from, int rank, int tag = 0) const {
        return started(MPI_Isend, from, rank, tag);
    }
    template <class T> Request isend(const std::vector<T> &from, int rank, int tag = 0) const {
        return isend(Buffer<T>(from), rank, tag);
    }
    template <class T> Request irecv(const Buffer<T> &to, int rank, int tag = 0) const {
        return started(MPI_Irecv, to, rank, tag);
    }
    template <class T> Request irecv(std::vector<T> &to, int rank, int tag = 0) const {
        Buffer<T> staged(to.size());
        Request request = irecv(staged, rank, tag);
        request.message_->done = [staged, &to] { to.assign(staged.begin(), staged.end()); };
        return request;
    }
    void wait(Request &request) const {
        if (request.message_ == nullptr) return; // moved from
        auto &message = *request.message_;
        ended(alchemist_wait(raw_, &message.raw));
        if (message.done) std::exchange(message.done, nullptr)();
        message.memory.reset();
    }
    // Of MPI's own requests: MPI still owns their memory when this throws, so it must be static or
    // in state(). The requests above have no such rule.
    void wait(MPI_Request &request) const { ended(alchemist_wait(raw_, &request)); }
    void allreduce(const void *in, void *out, int count, MPI_Datatype type, MPI_Op op) const {
        ended(alchemist_allreduce(raw_, in, out, count, type, op));
    }

  private:
    template <class Start, class T>
    Request started(Start start, const Buffer<T> &buffer, int rank, int tag) const {
        if (buffer.size() > static_cast<size_t>(std::numeric_limits<int>::max()))
            throw std::length_error("a message has at most 2^31 - 1 elements");
        Request request;
        request.message_->memory = buffer.items_;
        if (start(buffer.data(), static_cast<int>(buffer.size()), dtype_of<T>::mpi(), rank, tag,
                  raw_->comm, &request.message_->raw) != MPI_SUCCESS)
            throw std::runtime_error("MPI could not start a message");
        return request;
    }
    template <class M> static M *checked(M *matrix) {
        if (matrix == nullptr) throw HostFailed();
        return matrix;
    }
    static void ended(int code) {
        if (code == ALCHEMIST_FAILED) throw HostFailed();
        if (code != ALCHEMIST_OK) throw Ended();
    }
    alchemist_call *raw_;
};

namespace detail {

template <class T> struct never : std::false_type {};

template <class T, class = void> struct Value { // one per type: tag, from an argument, to a result
    static_assert(never<T>::value, "parameters and results are Matrix<T>, Sparse<T>, integers, double, bool, "
                                   "std::string, std::complex<double>, or std::vector of int64_t, "
                                   "double, bool or std::string; parameters also std::optional");
};

template <class T> struct Value<Matrix<T>> {
    static constexpr auto tag = ALCHEMIST_MATRIX;
    static Matrix<T> take(const alchemist_value &v) { return Matrix<T>(v.matrix); }
    static void give(Call &, alchemist_value &v, const Matrix<T> &x) { v.matrix = x.raw(); }
};
template <class T> struct Value<Sparse<T>> {
    static constexpr auto tag = ALCHEMIST_SPARSE;
    static Sparse<T> take(const alchemist_value &v) { return Sparse<T>(v.sparse); }
    static void give(Call &, alchemist_value &v, const Sparse<T> &x) { v.sparse = x.raw(); }
};
template <class T>
struct Value<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>> {
    static constexpr auto tag = ALCHEMIST_INT;
    static T take(const alchemist_value &v) {
        if (static_cast<int64_t>(static_cast<T>(v.integer)) != v.integer ||
            (std::is_unsigned_v<T> && v.integer < 0))
            throw Refused(std::to_string(v.integer) + " is out of range");
        return static_cast<T>(v.integer);
    }
    static void give(Call &, alchemist_value &v, T x) { v.integer = static_cast<int64_t>(x); }
};
template <class T, class C, alchemist_type Tag, C alchemist_value::*Item> struct ScalarValue {
    static constexpr auto tag = Tag;
    static T take(const alchemist_value &v) { return static_cast<T>(v.*Item); }
    static void give(Call &, alchemist_value &v, T x) { v.*Item = x; }
};
template <> struct Value<double>
    : ScalarValue<double, double, ALCHEMIST_FLOAT, &alchemist_value::number> {};
template <> struct Value<bool>
    : ScalarValue<bool, int32_t, ALCHEMIST_BOOL, &alchemist_value::flag> {};
template <> struct Value<std::complex<double>> {
    static constexpr auto tag = ALCHEMIST_COMPLEX;
    static std::complex<double> take(const alchemist_value &v) {
        return {v.complex_number[0], v.complex_number[1]};
    }
    static void give(Call &, alchemist_value &v, std::complex<double> x) {
        v.complex_number[0] = x.real();
        v.complex_number[1] = x.imag();
    }
};

template <class T> T *allocate(Call &call, size_t count) {
    void *memory = call.raw()->host->allocate(call.raw(), count * sizeof(T));
    if (memory == nullptr) throw HostFailed();
    return static_cast<T *>(memory);
}
inline const char *copy(Call &call, const std::string &text) {
    char *made = allocate<char>(call, text.size() + 1);
    memcpy(made, text.c_str(), text.size() + 1);
    return made;
}

template <> struct Value<std::string> {
    static constexpr auto tag = ALCHEMIST_STRING;
    static std::string take(const alchemist_value &v) { return v.string; }
    static void give(Call &call, alchemist_value &v, const std::string &x) {
        v.string = copy(call, x);
    }
};
// A list of T, stored as an array of C in one member of alchemist_value.
template <class T, class C, alchemist_type Tag, const C *alchemist_value::*Items> struct ListValue {
    static constexpr auto tag = Tag;
    static std::vector<T> take(const alchemist_value &v) {
        return std::vector<T>(v.*Items, v.*Items + v.count);
    }
    static void give(Call &call, alchemist_value &v, const std::vector<T> &x) {
        C *made = allocate<C>(call, x.size());
        for (size_t i = 0; i < x.size(); i++) {
            if constexpr (std::is_same_v<T, std::string>) made[i] = copy(call, x[i]);
            else made[i] = x[i];
        }
        v.*Items = made;
        v.count = static_cast<int64_t>(x.size());
    }
};
template <> struct Value<std::vector<int64_t>>
    : ListValue<int64_t, int64_t, ALCHEMIST_INTS, &alchemist_value::integers> {};
template <> struct Value<std::vector<double>>
    : ListValue<double, double, ALCHEMIST_FLOATS, &alchemist_value::numbers> {};
template <> struct Value<std::vector<bool>>
    : ListValue<bool, int32_t, ALCHEMIST_BOOLS, &alchemist_value::flags> {};
template <> struct Value<std::vector<std::string>>
    : ListValue<std::string, const char *, ALCHEMIST_STRINGS, &alchemist_value::strings> {};
template <class T> struct Value<std::optional<T>> {
    static constexpr auto tag = Value<T>::tag;
    static std::optional<T> take(const alchemist_value &v) {
        return v.given ? std::optional<T>(Value<T>::take(v)) : std::nullopt;
    }
};

template <class T> struct is_optional : std::false_type {};
template <class T> struct is_optional<std::optional<T>> : std::true_type {};

template <class R> struct Results { // one
    static std::vector<alchemist_type> tags() { return {Value<R>::tag}; }
    static void give(Call &call, alchemist_value *out, const R &x) {
        Value<R>::give(call, out[0], x);
    }
};
template <class... R> struct Results<std::tuple<R...>> {
    static std::vector<alchemist_type> tags() { return {Value<R>::tag...}; }
    static void give(Call &call, alchemist_value *out, const std::tuple<R...> &x) {
        std::apply([&](const R &...each) { (Value<R>::give(call, *out++, each), ...); }, x);
    }
};

template <class T> struct writes_to_argument : std::false_type {};
template <class T>
struct writes_to_argument<Matrix<T>> : std::bool_constant<!std::is_const_v<T>> {};
template <class T>
struct writes_to_argument<std::optional<Matrix<T>>> : writes_to_argument<Matrix<T>> {};

// A parameter Matrix<const T> is read, a Matrix<T> is changed in place.
template <class T> constexpr alchemist_type parameter_tag() {
    if (Value<T>::tag != ALCHEMIST_MATRIX) return Value<T>::tag;
    return writes_to_argument<T>::value ? ALCHEMIST_MATRIX_WRITTEN : ALCHEMIST_MATRIX_READ;
}

template <class T> auto taken(const alchemist_value *in, size_t i) {
    try {
        return Value<T>::take(in[i]);
    } catch (const Refused &error) {
        throw Refused("argument " + std::to_string(i + 1) + ": " + error.what());
    }
}

template <class F> struct Function;
template <class R, class... P> struct Function<R (*)(Call &, P...)> {
    static constexpr size_t parameters = sizeof...(P);
    static std::vector<alchemist_type> tags() { return {parameter_tag<std::decay_t<P>>()...}; }
    static std::vector<bool> optional() { return {is_optional<std::decay_t<P>>::value...}; }
    static std::vector<alchemist_type> result_tags() {
        if constexpr (std::is_void_v<R>) return {};
        else return Results<R>::tags();
    }
    template <auto F, size_t... I>
    static void run(Call &call, const alchemist_value *in, alchemist_value *out,
                    std::index_sequence<I...>) {
        if constexpr (std::is_void_v<R>) F(call, taken<std::decay_t<P>>(in, I)...);
        else Results<R>::give(call, out, F(call, taken<std::decay_t<P>>(in, I)...));
        (void)in;
        (void)out;
    }
};

template <auto F>
int trampoline(alchemist_call *raw, const alchemist_value *in, alchemist_value *out) {
    using Of = Function<decltype(F)>;
    Call call(raw);
    release_finished();
    try {
        Of::template run<F>(call, in, out, std::make_index_sequence<Of::parameters>());
        return ALCHEMIST_OK;
    } catch (const Ended &) {
        return ALCHEMIST_ENDED;
    } catch (const HostFailed &) {
        return ALCHEMIST_FAILED;
    } catch (const Refused &error) {
        return alchemist_refuse(raw, "%s", error.what());
    } catch (const std::exception &error) {
        return alchemist_fail(raw, "%s", error.what());
    } catch (...) {
        return alchemist_fail(raw, "an exception that is not a std::exception");
    }
}

} // namespace detail

struct Parameter {
    const char *name;
    const char *doc = "";
    const char *default_value = nullptr; // JSON, as in alchemist.h
};

struct Result {
    const char *name;
    const char *doc = "";
};

// ALCHEMIST_CPP_LIBRARY registers routines on it.
class Library {
  public:
    Library(const char *name, const char *doc) : name_(name), doc_(doc) {}

    template <auto F>
    void routine(const char *name, const char *doc, std::initializer_list<Parameter> parameters = {},
                 std::initializer_list<Result> results = {}) {
        using Of = detail::Function<decltype(F)>;
        auto tags = Of::tags();
        auto optional = Of::optional();
        auto result_tags = Of::result_tags();
        auto &taken = parameters_.emplace_back();
        auto &given = results_.emplace_back();
        if (parameters.size() != tags.size() || results.size() != result_tags.size()) {
            taken.push_back({"", ALCHEMIST_INT, "", nullptr}); // the host rejects an empty name
        } else {
            for (const auto &p : parameters) {
                size_t i = taken.size();
                const char *value = p.default_value == nullptr && optional[i] ? "null" : p.default_value;
                taken.push_back({p.name, tags[i], p.doc, value});
            }
            for (const auto &r : results) given.push_back({r.name, result_tags[given.size()], r.doc});
        }
        taken.push_back({});
        given.push_back({});
        routines_.push_back({name, doc, &detail::trampoline<F>, taken.data(), given.data()});
    }

    const alchemist_library *describe() {
        routines_.push_back({});
        raw_ = {ALCHEMIST_ABI, name_, doc_, routines_.data(),
                [](void *state) { delete static_cast<detail::Holder *>(state); }};
        return &raw_;
    }

  private:
    const char *name_, *doc_;
    std::deque<std::vector<alchemist_parameter>> parameters_;
    std::deque<std::vector<alchemist_result>> results_;
    std::vector<alchemist_routine> routines_;
    alchemist_library raw_{};
};

} // namespace alchemist

// Followed by the body of a function that registers the routines on `library`.
#define ALCHEMIST_CPP_LIBRARY(NAME, DOC)                                                   \
    static void alchemist_register(alchemist::Library &library);                           \
    extern "C" ALCHEMIST_EXPORT const alchemist_library *alchemist_library_describe(void) { \
        static const alchemist_library *raw = [] {                                         \
            static alchemist::Library library(NAME, DOC);                                  \
            alchemist_register(library);                                                   \
            return library.describe();                                                     \
        }();                                                                               \
        return raw;                                                                        \
    }                                                                                      \
    static void alchemist_register(alchemist::Library &library)

#endif
