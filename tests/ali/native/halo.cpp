// Messages of vectors on the stack, in a call that may end while they are under way.
#include <alchemist.hpp>

using alchemist::Call;

// The sum of the neighbours' numbers; rank `fails` throws before it sends, the others wait for it.
double exchange(Call &call, int64_t count, int64_t fails) {
    const int left = (call.rank() + call.size() - 1) % call.size();
    const int right = (call.rank() + 1) % call.size();
    std::vector<double> mine(count, call.rank() + 1.0), from_left(count), from_right(count);
    auto first = call.irecv(from_left, left, 1);
    auto second = call.irecv(from_right, right, 2);
    if (call.rank() == fails) throw std::runtime_error("as asked");
    auto third = call.isend(mine, right, 1);
    auto fourth = call.isend(mine, left, 2);
    for (auto *request : {&first, &second, &third, &fourth}) call.wait(*request);
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += from_left[i] + from_right[i];
    call.allreduce(&sum, &sum, 1, MPI_DOUBLE, MPI_SUM);
    return sum / count;
}

ALCHEMIST_CPP_LIBRARY("halo", "Messages between neighbours.") {
    library.routine<exchange>("exchange", "Sum over all ranks of their neighbours' numbers.",
                              {{"count", "elements of a message"}, {"fails", "a rank", "-1"}},
                              {{"sum", "over all ranks"}});
}
