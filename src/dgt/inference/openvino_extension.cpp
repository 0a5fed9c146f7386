// DG-Attention as one operator of OpenVINO on CPUs: `DGAttention` of the domain `dgt`, in ONNX files and in OpenVINO's.
//
// Two forms:
//
//   (query, key, value, centroids) -> output    (B, H, L, D) three times, (H, G, D) -> (B, H, L, D)
//   (qkv, centroids) -> output                  (B, L, 3 H D), (H, G, D) -> (B, L, H D): the projections, as they are
//
// The kernel is that of PyTorch on CPUs, src/dgt/ops/native/kernels. Its threads are those of OpenVINO's stream: no
// others are started. src/dgt/inference/openvino_extension.py compiles it for the OpenVINO that is installed, whose
// C++ interface is bound to its version.

#include <openvino/core/op_extension.hpp>
#include <openvino/core/parallel.hpp>
#include <openvino/frontend/onnx/extension/op.hpp>
#include <openvino/op/op.hpp>

#include "interface.h"

namespace {

// Sizes of a call; H, G and D are those of the centroids.
struct Sizes {
    int64_t images;
    int64_t heads;
    int64_t queries;
    int64_t keys;
    int64_t channels;
    int64_t groups;
};

// OpenVINO's own threads, as `interface.h` asks for them.
int run_in_openvino(int64_t begin, int64_t end, int64_t, dgt_body body, void* context) {
    ov::parallel_for(end - begin, [&](int64_t i) { body(begin + i, begin + i + 1, context); });
    return 0;
}

bool is_supported(const ov::element::Type& type) {
    return type == ov::element::f32 || type == ov::element::bf16 || type == ov::element::f16;
}

dgt_type type_of(const ov::Tensor& tensor) {
    if (tensor.get_element_type() == ov::element::bf16) return DGT_BFLOAT16;
    if (tensor.get_element_type() == ov::element::f16) return DGT_FLOAT16;
    return DGT_FLOAT32;
}

// Contiguous (B, H, N, D) tokens.
dgt_tokens tokens_by_head(void* data, int64_t heads, int64_t count, int64_t channels) {
    return {data, heads * count * channels, count * channels, channels};
}

// One of `parts` contiguous (B, N, H, D) tokens that stand side by side as (B, N, parts, H, D).
dgt_tokens tokens_of_projection(const ov::Tensor& tensor, int64_t part, int64_t parts, const Sizes& sizes) {
    int64_t width = sizes.heads * sizes.channels;
    char* data = (char*)tensor.data() + part * width * (int64_t)tensor.get_element_type().size();
    return {data, sizes.queries * parts * width, sizes.channels, parts * width};
}

}  // namespace

class DGAttention : public ov::op::Op {
public:
    OPENVINO_OP("DGAttention", "dgt");

    DGAttention() = default;
    DGAttention(const ov::OutputVector& inputs, int64_t top_k, float scale) : Op(inputs), top_k_(top_k), scale_(scale) {
        constructor_validate_and_infer_types();
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<DGAttention>(inputs, top_k_, scale_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("top_k", top_k_);
        visitor.on_attribute("scale", scale_);
        return true;
    }

    void validate_and_infer_types() override {
        NODE_VALIDATION_CHECK(this, get_input_size() == 2 || get_input_size() == 4, "takes 2 or 4 inputs, got ",
                              get_input_size());
        NODE_VALIDATION_CHECK(this, top_k_ >= 1, "top_k must be at least 1, got ", top_k_);
        size_t last = get_input_size() - 1;
        for (size_t i = 0; i < last; ++i) {
            ov::element::Type type = get_input_element_type(i);
            NODE_VALIDATION_CHECK(this, type.is_dynamic() || is_supported(type), "takes f32, bf16 or f16, got ", type);
            NODE_VALIDATION_CHECK(this, type == get_input_element_type(0), "takes one type, got ", type, " beside ",
                                  get_input_element_type(0));
        }
        NODE_VALIDATION_CHECK(this, get_input_partial_shape(last).rank().compatible(3),
                              "centroids must be (H, G, D), got ", get_input_partial_shape(last));
        set_output_type(0, get_input_element_type(0), is_packed() ? infer_packed_shape() : infer_shape());
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        dgt_problem problem = {};
        ov::Tensor centroids = inputs.back();
        OPENVINO_ASSERT(centroids.get_element_type() == ov::element::f32, "DGAttention: centroids must be f32");
        if (is_packed()) describe_packed(problem, inputs, outputs[0]);
        else describe(problem, inputs, outputs[0]);
        problem.type = type_of(inputs[0]);
        problem.list_length = std::min(top_k_, problem.keys);
        problem.centroids = centroids.data<float>();
        problem.scale = scale_;
        problem.threads = parallel_get_max_threads();
        problem.parallel_for = run_in_openvino;
        check(dgt_attention(&problem));
        return true;
    }

private:
    bool is_packed() const { return get_input_size() == 2; }

    ov::PartialShape infer_shape() const {
        ov::PartialShape key = get_input_partial_shape(1);
        NODE_VALIDATION_CHECK(this, key.compatible(get_input_partial_shape(2)), "key and value must be of one shape, ",
                              key, " and ", get_input_partial_shape(2));
        NODE_VALIDATION_CHECK(this, get_input_partial_shape(0).rank().compatible(4), "query must be (B, H, L, D), got ",
                              get_input_partial_shape(0));
        return get_input_partial_shape(0);
    }

    ov::PartialShape infer_packed_shape() const {
        ov::PartialShape qkv = get_input_partial_shape(0);
        NODE_VALIDATION_CHECK(this, qkv.rank().compatible(3), "qkv must be (B, L, 3 H D), got ", qkv);
        if (qkv.rank().is_dynamic()) return ov::PartialShape::dynamic(3);
        ov::PartialShape centroids = get_input_partial_shape(1);
        if (centroids.is_static()) {
            ov::Dimension width = centroids[0] * centroids[2];
            NODE_VALIDATION_CHECK(this, qkv[2].compatible(width * 3), "qkv must be (B, L, 3 H D) with centroids ",
                                  centroids, ", got ", qkv);
            return {qkv[0], qkv[1], width};
        }
        return {qkv[0], qkv[1], ov::Dimension::dynamic()};
    }

    static Sizes sizes_of(const ov::Shape& query, const ov::Shape& key, const ov::Shape& centroids) {
        bool fits = query.size() == 4 && key.size() == 4 && query[0] == key[0] && query[1] == centroids[0] &&
                    key[1] == centroids[0] && query[3] == centroids[2] && key[3] == centroids[2];
        OPENVINO_ASSERT(fits, "DGAttention: query ", query, " and key ", key, " do not fit centroids ", centroids);
        return {(int64_t)query[0], (int64_t)query[1], (int64_t)query[2],
                (int64_t)key[2],   (int64_t)query[3], (int64_t)centroids[1]};
    }

    static void set_sizes(dgt_problem& problem, const Sizes& sizes) {
        problem.images = sizes.images;
        problem.heads = sizes.heads;
        problem.key_heads = sizes.heads;
        problem.queries = sizes.queries;
        problem.keys = sizes.keys;
        problem.channels = sizes.channels;
        problem.groups = sizes.groups;
    }

    void describe(dgt_problem& problem, const ov::TensorVector& inputs, ov::Tensor& output) const {
        OPENVINO_ASSERT(inputs[1].get_shape() == inputs[2].get_shape(), "DGAttention: key ", inputs[1].get_shape(),
                        " and value ", inputs[2].get_shape(), " differ in shape");
        Sizes sizes = sizes_of(inputs[0].get_shape(), inputs[1].get_shape(), inputs[3].get_shape());
        output.set_shape(inputs[0].get_shape());
        set_sizes(problem, sizes);
        problem.query = tokens_by_head((void*)inputs[0].data(), sizes.heads, sizes.queries, sizes.channels);
        problem.key = tokens_by_head((void*)inputs[1].data(), sizes.heads, sizes.keys, sizes.channels);
        problem.value = tokens_by_head((void*)inputs[2].data(), sizes.heads, sizes.keys, sizes.channels);
        problem.output = tokens_by_head(output.data(), sizes.heads, sizes.queries, sizes.channels);
    }

    void describe_packed(dgt_problem& problem, const ov::TensorVector& inputs, ov::Tensor& output) const {
        ov::Shape qkv = inputs[0].get_shape(), centroids = inputs[1].get_shape();
        size_t width = centroids[0] * centroids[2];
        OPENVINO_ASSERT(qkv.size() == 3 && qkv[2] == 3 * width, "DGAttention: qkv ", qkv, " does not fit centroids ",
                        centroids);
        ov::Shape tokens = {qkv[0], centroids[0], qkv[1], centroids[2]};
        Sizes sizes = sizes_of(tokens, tokens, centroids);
        output.set_shape({qkv[0], qkv[1], width});
        set_sizes(problem, sizes);
        problem.query = tokens_of_projection(inputs[0], 0, 3, sizes);
        problem.key = tokens_of_projection(inputs[0], 1, 3, sizes);
        problem.value = tokens_of_projection(inputs[0], 2, 3, sizes);
        problem.output = tokens_of_projection(output, 0, 1, sizes);
    }

    static void check(int status) {
        OPENVINO_ASSERT(status != DGT_NAN_IN_QUERY, "DGAttention: query must be finite, got NaN or infinities");
        OPENVINO_ASSERT(status != DGT_NAN_IN_KEY, "DGAttention: key must be finite, got NaN or infinities");
        OPENVINO_ASSERT(status == DGT_GOOD, "DGAttention: no memory for the attention of so many tokens");
    }

    int64_t top_k_ = 1;
    float scale_ = 1.0f;
};

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({
    std::make_shared<ov::OpExtension<DGAttention>>(),
    std::make_shared<ov::frontend::onnx::OpExtension<DGAttention>>(
        "DGAttention", "dgt", std::map<std::string, std::string>{{"top_k", "top_k"}, {"scale", "scale"}}),
}));
