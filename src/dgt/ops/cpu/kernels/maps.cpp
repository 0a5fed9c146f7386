// Operators on channels-last maps in training (maps.h).

#include "maps.h"

#include "add_depthwise.h"
#include "gelu_norm.h"

namespace dgt {
namespace {

// Lay out the working memory of a kernel for the type of a problem, and let `steps(kernel, member)` run on all threads.
template <template <class> class Kernel, class Steps>
int run(const dgt_map_problem& x, const Steps& steps) {
    return with_type(x.type, [&](auto of_type) -> int {
        using Typed = Kernel<decltype(of_type)>;
        size_t bytes = bytes_of<Typed>(x);
        Block block(bytes);
        if (block.failed()) return DGT_NO_MEMORY;
        Arena arena(block.aligned(), bytes);
        Typed kernel(arena, x);
        in_parallel(x, thread_count(x), [&](Member& member) { steps(kernel, member); });
        return DGT_GOOD;
    });
}

}  // namespace
}  // namespace dgt

int dgt_map_problem_size() { return (int)sizeof(dgt_map_problem); }

int dgt_gelu_norm(const dgt_map_problem* problem) {
    return dgt::run<dgt::GeluNorm>(*problem, [](const auto& norm, dgt::Member& member) {
        norm.find_statistics(member);
        norm.use_statistics(member);
        norm.write_output(member);
    });
}

int dgt_gelu_norm_again(const dgt_map_problem* problem) {
    return dgt::run<dgt::GeluNorm>(*problem, [](const auto& norm, dgt::Member& member) {
        norm.use_statistics(member);
        norm.write_output(member);
    });
}

int dgt_gelu_norm_backward(const dgt_map_problem* problem) {
    return dgt::run<dgt::GeluNorm>(*problem, [](const auto& norm, dgt::Member& member) {
        norm.use_statistics(member);
        norm.find_parameter_gradients(member);
        norm.write_input_gradient(member);
    });
}

int dgt_add_depthwise(const dgt_map_problem* problem) {
    return dgt::run<dgt::AddDepthwise>(*problem, [](const auto& convolution, dgt::Member& member) {
        convolution.read_parameters(member);
        convolution.write_output(member);
    });
}

int dgt_add_depthwise_backward(const dgt_map_problem* problem) {
    return dgt::run<dgt::AddDepthwise>(*problem, [](const auto& convolution, dgt::Member& member) {
        convolution.read_parameters(member);
        convolution.write_gradients(member);
    });
}
