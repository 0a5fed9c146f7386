// Attention in groups as operators of OpenVINO on CPUs, in the domain `dgt` of ONNX files and of OpenVINO's own.
//
//   DGAttention           Dynamic Group Attention, with centroids (H, G, D) as its last input; also with residual keys
//   DGClusteredAttention  attention of pretrained models, in groups found in the tokens themselves
//
// Each takes its tokens in one of two layouts:
//
//   (query, key, value) -> output    (B, H, L, D) and two of (B, H, S, D) -> (B, H, L, D)
//   (qkv) -> output                  (B, L, 3 H D) -> (B, L, H D): the projections, unchanged
//
// The kernels are the same as PyTorch's on CPUs, src/dgt/ops/cpu/kernels. They run on the threads of OpenVINO's
// stream and start no others. src/dgt/inference/openvino_extension.py compiles this for the installed OpenVINO, whose
// C++ interface is tied to its version; it also defines the numbers DGT_CLUSTER_*.

#include <algorithm>
#include <numeric>
#include <openvino/core/op_extension.hpp>
#include <openvino/core/parallel.hpp>
#include <openvino/frontend/onnx/extension/conversion.hpp>
#include <openvino/frontend/onnx/extension/op.hpp>
#include <openvino/op/op.hpp>

#include "interface.h"

namespace {

// OpenVINO's own threads, with the signature that `interface.h` requires.
int run_in_openvino(int64_t begin, int64_t end, int64_t, dgt_body body, void* context) {
    ov::parallel_for(end - begin, [&](int64_t i) { body(begin + i, begin + i + 1, context); });
    return 0;
}

void check(int status, const char* name) {
    OPENVINO_ASSERT(status != DGT_NAN_IN_QUERY, name, ": query must be finite, got NaN or infinities");
    OPENVINO_ASSERT(status != DGT_NAN_IN_KEY, name, ": key must be finite, got NaN or infinities");
    OPENVINO_ASSERT(status == DGT_GOOD, name, ": not enough memory for the attention of this many tokens");
}

// ---- tokens in either layout ----------------------------------------------------------------------------------------

dgt_type type_of(const ov::Tensor& tensor) {
    if (tensor.get_element_type() == ov::element::bf16) return DGT_BFLOAT16;
    if (tensor.get_element_type() == ov::element::f16) return DGT_FLOAT16;
    return DGT_FLOAT32;
}

// Contiguous (B, H, N, D) tokens.
dgt_tokens tokens_by_head(const ov::Tensor& tensor) {
    int64_t heads = tensor.get_shape()[1], count = tensor.get_shape()[2], channels = tensor.get_shape()[3];
    return {(void*)tensor.data(), heads * count * channels, count * channels, channels};
}

// One of `parts` (B, N, H, D) tensors of tokens that are interleaved as (B, N, parts, H, D).
dgt_tokens tokens_of_projection(const ov::Tensor& tensor, int64_t part, int64_t parts, int64_t channels) {
    int64_t count = tensor.get_shape()[1], width = tensor.get_shape()[2];
    char* data = (char*)tensor.data() + part * width / parts * (int64_t)tensor.get_element_type().size();
    return {data, count * width, channels, width};
}

void describe_by_head(dgt_problem& problem, const ov::TensorVector& tokens, const char* name) {
    ov::Shape query = tokens[0].get_shape(), key = tokens[1].get_shape(), value = tokens[2].get_shape();
    bool fits = query.size() == 4 && key.size() == 4 && query[0] == key[0] && query[3] == key[3] && key == value &&
                key[1] > 0 && query[1] % key[1] == 0;
    OPENVINO_ASSERT(fits, name, ": query ", query, ", key ", key, " and value ", value, " do not match");
    problem.images = query[0];
    problem.heads = query[1];
    problem.key_heads = key[1];
    problem.queries = query[2];
    problem.keys = key[2];
    problem.channels = query[3];
    problem.query = tokens_by_head(tokens[0]);
    problem.key = tokens_by_head(tokens[1]);
    problem.value = tokens_by_head(tokens[2]);
}

void describe_projection(dgt_problem& problem, const ov::Tensor& qkv, int64_t heads, const char* name) {
    ov::Shape shape = qkv.get_shape();
    bool fits = shape.size() == 3 && heads > 0 && shape[2] % (3 * heads) == 0;
    OPENVINO_ASSERT(fits, name, ": qkv must be (B, L, 3 H D) with ", heads, " heads, got ", shape);
    problem.images = shape[0];
    problem.heads = problem.key_heads = heads;
    problem.queries = problem.keys = shape[1];
    problem.channels = shape[2] / 3 / heads;
    problem.query = tokens_of_projection(qkv, 0, 3, problem.channels);
    problem.key = tokens_of_projection(qkv, 1, 3, problem.channels);
    problem.value = tokens_of_projection(qkv, 2, 3, problem.channels);
}

// Describe a call for tokens in either layout; `heads` is used for projections only.
dgt_problem describe(const ov::TensorVector& tokens, ov::Tensor& output, int64_t heads, const char* name) {
    dgt_problem problem = {};
    if (tokens.size() == 1) {
        describe_projection(problem, tokens[0], heads, name);
        ov::Shape shape = tokens[0].get_shape();
        output.set_shape({shape[0], shape[1], shape[2] / 3});
        problem.output = tokens_of_projection(output, 0, 1, problem.channels);
    } else {
        describe_by_head(problem, tokens, name);
        output.set_shape(tokens[0].get_shape());
        problem.output = tokens_by_head(output);
    }
    problem.type = type_of(tokens[0]);
    problem.threads = parallel_get_max_threads();
    problem.parallel_for = run_in_openvino;
    return problem;
}

bool is_supported(const ov::element::Type& type) {
    return type.is_dynamic() || type == ov::element::f32 || type == ov::element::bf16 || type == ov::element::f16;
}

// Check the tokens, which are the first `count` inputs of an operator; returns the shape of its output.
ov::PartialShape infer_shape(const ov::op::Op* op, size_t count) {
    NODE_VALIDATION_CHECK(op, count == 1 || count == 3, "takes tokens as 1 or 3 inputs, got ", count);
    int64_t rank = count == 1 ? 3 : 4;
    for (size_t i = 0; i < count; ++i) {
        ov::element::Type type = op->get_input_element_type(i);
        NODE_VALIDATION_CHECK(op, is_supported(type), "takes f32, bf16 or f16, got ", type);
        NODE_VALIDATION_CHECK(op, type == op->get_input_element_type(0), "takes tokens of one type, got ", type,
                              " and ", op->get_input_element_type(0));
        NODE_VALIDATION_CHECK(op, op->get_input_partial_shape(i).rank().compatible(rank), "takes tokens of ", rank,
                              " dimensions, got ", op->get_input_partial_shape(i));
    }
    ov::PartialShape shape = op->get_input_partial_shape(0);
    if (shape.rank().is_dynamic()) return ov::PartialShape::dynamic(rank);
    if (count == 1) shape[2] = shape[2].is_static() ? ov::Dimension(shape[2].get_length() / 3) : ov::Dimension();
    return shape;
}

// ---- clusters of tokens ------------------------------------------------------------------------------------------

// Token numbers ordered so that any number of the first ones is evenly spread, as in `spread_out` of dgt.ops.lloyd.
std::vector<int32_t> spread_out(int64_t count) {
    auto place = [](int32_t i) { return (uint32_t)i * (uint32_t)DGT_CLUSTER_GOLDEN; };
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return place(a) < place(b); });
    return order;
}

// Like `sample_distance` in the same module.
int64_t sample_distance(int64_t tokens, int64_t clusters) {
    int64_t every = tokens / (DGT_CLUSTER_LEAST * clusters);
    return std::max<int64_t>(1, std::min<int64_t>(DGT_CLUSTER_EVERY, every));
}

dgt_clusters describe_clusters(int64_t count, const std::vector<int32_t>& order) {
    dgt_clusters clusters = {};
    clusters.count = count;
    clusters.steps = DGT_CLUSTER_STEPS;
    clusters.every = sample_distance((int64_t)order.size(), std::max<int64_t>(1, count));
    clusters.order = order.data();
    return clusters;
}

// The clusters of `count` tokens of every head: (B, H, N) ids. Types, images and threads are those of a problem.
std::vector<int64_t> cluster(const dgt_problem& of, const dgt_tokens& tokens, int64_t heads, int64_t count,
                             int64_t channels, int64_t clusters, const char* name) {
    std::vector<int64_t> ids(of.images * heads * count);
    std::vector<float> centroids(of.images * heads * clusters * channels);
    std::vector<int32_t> order = spread_out(count);
    dgt_problem problem = {};
    problem.images = of.images;
    problem.heads = problem.key_heads = heads;
    problem.queries = problem.keys = count;
    problem.channels = channels;
    problem.type = of.type;
    problem.query = problem.key = tokens;
    problem.scale = 1;
    problem.query_clusters = describe_clusters(clusters, order);
    problem.query_clusters.centroids = centroids.data();
    problem.query_clusters.ids = ids.data();
    problem.query_clusters.ids_image_stride = heads * count;
    problem.query_clusters.ids_head_stride = count;
    problem.threads = of.threads;
    problem.parallel_for = of.parallel_for;
    check(dgt_cluster_tokens(&problem), name);
    return ids;
}

}  // namespace

class DGAttention : public ov::op::Op {
public:
    OPENVINO_OP("DGAttention", "dgt");

    DGAttention() = default;
    DGAttention(const ov::OutputVector& inputs, int64_t top_k, int64_t residual_keys, float scale)
        : Op(inputs), top_k_(top_k), residual_keys_(residual_keys), scale_(scale) {
        constructor_validate_and_infer_types();
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<DGAttention>(inputs, top_k_, residual_keys_, scale_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("top_k", top_k_);
        visitor.on_attribute("residual_keys", residual_keys_);
        visitor.on_attribute("scale", scale_);
        return true;
    }

    void validate_and_infer_types() override {
        NODE_VALIDATION_CHECK(this, get_input_size() > 1, "takes centroids as its last input");
        NODE_VALIDATION_CHECK(this, top_k_ >= 1, "top_k must be at least 1, got ", top_k_);
        NODE_VALIDATION_CHECK(this, residual_keys_ >= 0, "residual_keys must be at least 0, got ", residual_keys_);
        size_t last = get_input_size() - 1;
        NODE_VALIDATION_CHECK(this, get_input_partial_shape(last).rank().compatible(3),
                              "centroids must be (H, G, D), got ", get_input_partial_shape(last));
        set_output_type(0, get_input_element_type(0), infer_shape(this, last));
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        const ov::Tensor& centroids = inputs.back();
        ov::Shape shape = centroids.get_shape();
        OPENVINO_ASSERT(centroids.get_element_type() == ov::element::f32, "DGAttention: centroids must be f32");
        ov::TensorVector tokens(inputs.begin(), inputs.end() - 1);
        dgt_problem problem = describe(tokens, outputs[0], shape[0], "DGAttention");
        bool fits = problem.heads == (int64_t)shape[0] && problem.key_heads == (int64_t)shape[0] &&
                    problem.channels == (int64_t)shape[2];
        OPENVINO_ASSERT(fits, "DGAttention: centroids must be (H, G, D) of the tokens, got ", shape);
        problem.groups = shape[1];
        problem.list_length = std::min(top_k_, problem.keys);
        problem.centroids = (const float*)centroids.data();
        problem.scale = scale_;
        if (residual_keys_) attend_to_residual_keys(problem);
        else check(dgt_attention(&problem), "DGAttention");
        return true;
    }

private:
    void attend_to_residual_keys(dgt_problem& problem) const {
        OPENVINO_ASSERT(residual_keys_ == 1 || residual_keys_ <= problem.keys, "DGAttention: residual_keys must be at ",
                        "most the ", problem.keys, " tokens, got ", residual_keys_);
        int64_t heads = problem.images * problem.heads;
        std::vector<int64_t> group_ids(heads * problem.queries);
        std::vector<int64_t> key_ids(heads * problem.groups * problem.list_length);
        std::vector<int64_t> clusters;
        problem.group_ids = group_ids.data();
        problem.key_ids = key_ids.data();
        if (residual_keys_ > 1) {
            clusters = cluster(problem, problem.key, problem.key_heads, problem.keys, problem.channels, residual_keys_,
                               "DGAttention");
            problem.key_clusters.ids = clusters.data();
            problem.key_clusters.ids_image_stride = problem.heads * problem.keys;
            problem.key_clusters.ids_head_stride = problem.keys;
        }
        problem.key_clusters.count = residual_keys_;
        check(dgt_attention(&problem), "DGAttention");
    }

    int64_t top_k_ = 1;
    int64_t residual_keys_ = 0;
    float scale_ = 1.0f;
};

class DGClusteredAttention : public ov::op::Op {
public:
    OPENVINO_OP("DGClusteredAttention", "dgt");

    // The arguments of `dgt.clustered_attention`.
    struct Settings {
        int64_t num_heads = 1;  // for projections
        int64_t num_groups = 1;
        int64_t top_k = 1;
        int64_t residual_keys = 1;
        int64_t num_prefix_tokens = 0;
        int64_t share_key_clusters = 0;  // in files of earlier code; 1 is refused
        int64_t first_order = 0;
        float scale = 1.0f;
    };

    DGClusteredAttention() = default;
    DGClusteredAttention(const ov::OutputVector& inputs, const Settings& settings) : Op(inputs), settings_(settings) {
        constructor_validate_and_infer_types();
    }

    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        return std::make_shared<DGClusteredAttention>(inputs, settings_);
    }

    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("num_heads", settings_.num_heads);
        visitor.on_attribute("num_groups", settings_.num_groups);
        visitor.on_attribute("top_k", settings_.top_k);
        visitor.on_attribute("residual_keys", settings_.residual_keys);
        visitor.on_attribute("num_prefix_tokens", settings_.num_prefix_tokens);
        visitor.on_attribute("share_key_clusters", settings_.share_key_clusters);
        visitor.on_attribute("first_order", settings_.first_order);
        visitor.on_attribute("scale", settings_.scale);
        return true;
    }

    void validate_and_infer_types() override {
        NODE_VALIDATION_CHECK(
            this, settings_.share_key_clusters == 0, "share_key_clusters must be 0, got ", settings_.share_key_clusters,
            ": this file is of an earlier dgt, whose heads could share ", "clusters of keys; export the model again");
        set_output_type(0, get_input_element_type(0), infer_shape(this, get_input_size()));
    }

    bool has_evaluate() const override { return true; }

    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        dgt_problem problem = describe(inputs, outputs[0], settings_.num_heads, "DGClusteredAttention");
        int64_t prefix = settings_.num_prefix_tokens;
        int64_t queries = problem.queries - prefix, keys = problem.keys - prefix;
        bool fits = queries >= settings_.num_groups && keys >= std::max<int64_t>(1, settings_.residual_keys);
        OPENVINO_ASSERT(fits, "DGClusteredAttention: ", settings_.num_groups, " groups and ", settings_.residual_keys,
                        " residual keys exceed the tokens after the prefix, ", queries, " queries and ", keys, " keys");
        problem.prefix = prefix;
        problem.list_length = prefix + std::min(settings_.top_k, keys);
        problem.scale = settings_.scale;
        problem.first_order = settings_.first_order;
        std::vector<int32_t> order_of_queries = spread_out(queries), order_of_keys = spread_out(keys);
        problem.query_clusters = describe_clusters(settings_.num_groups, order_of_queries);
        problem.key_clusters = describe_clusters(settings_.residual_keys, order_of_keys);
        check(dgt_clustered_attention(&problem), "DGClusteredAttention");
        return true;
    }

private:
    Settings settings_;
};

namespace {

// An operator for ONNX files whose attributes have the same names as in OpenVINO.
template <class Operator>
ov::Extension::Ptr onnx_operator(const std::string& name, const std::vector<std::string>& attributes) {
    std::map<std::string, std::string> names;
    for (const std::string& attribute : attributes) names[attribute] = attribute;
    return std::make_shared<ov::frontend::onnx::OpExtension<Operator>>(name, "dgt", names);
}

// By hand, as an attribute may be missing: files of earlier code alone have `share_key_clusters`.
ov::OutputVector read_clustered_attention(const ov::frontend::NodeContext& node) {
    DGClusteredAttention::Settings settings;
    settings.num_heads = node.get_attribute<int64_t>("num_heads");
    settings.num_groups = node.get_attribute<int64_t>("num_groups");
    settings.top_k = node.get_attribute<int64_t>("top_k");
    settings.residual_keys = node.get_attribute<int64_t>("residual_keys");
    settings.num_prefix_tokens = node.get_attribute<int64_t>("num_prefix_tokens");
    settings.share_key_clusters = node.get_attribute<int64_t>("share_key_clusters", 0);
    settings.first_order = node.get_attribute<int64_t>("first_order");
    settings.scale = node.get_attribute<float>("scale");
    ov::OutputVector inputs;
    for (size_t i = 0; i < node.get_input_size(); ++i) inputs.push_back(node.get_input((int)i));
    return {std::make_shared<DGClusteredAttention>(inputs, settings)};
}

}  // namespace

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({
    std::make_shared<ov::OpExtension<DGAttention>>(),
    onnx_operator<DGAttention>("DGAttention", {"top_k", "residual_keys", "scale"}),
    std::make_shared<ov::OpExtension<DGClusteredAttention>>(),
    std::make_shared<ov::frontend::onnx::ConversionExtension>("DGClusteredAttention", "dgt", read_clustered_attention),
}));
