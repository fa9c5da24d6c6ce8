// The ops as torch knows them: every schema, and the checks between a tensor and a kernel.
//
// Only torch's stable ABI is used, as of 2.11 (TORCH_TARGET_VERSION), so that one build serves that version and later ones.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "kernels.h"
#include "launch.h"

#ifndef CUDA_ON_CPU
// Absent from a CPU build of torch, where the library must load all the same.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace {

using offload_rt::check_cuda;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#ifdef CUDA_ON_CPU
struct Device {
  cudaStream_t stream = nullptr;
  int n_processors = 16;
  explicit Device(const Tensor&) {}
};
bool is_on_device(const Tensor& x) { return x.is_cpu(); }
#else
// Makes the tensor's card the current one, and knows what the launch needs of it.
struct Device {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;
  int n_processors = 0;

  explicit Device(const Tensor& x) : guard(x.get_device_index()) {
    void* current = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this build of torch has no CUDA");
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &current));
    stream = static_cast<cudaStream_t>(current);
    check_cuda(cudaDeviceGetAttribute(&n_processors, cudaDevAttrMultiProcessorCount, x.get_device_index()),
               "number of multiprocessors");
  }
};
bool is_on_device(const Tensor& x) { return x.is_cuda(); }
#endif

void check_dense(const Tensor& x, const char* name, ScalarType dtype, int64_t n_dims) {
  STD_TORCH_CHECK(is_on_device(x), name, " must be on the device of the op");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " has the wrong dtype");
  STD_TORCH_CHECK(x.dim() == n_dims, name, " must have ", n_dims, " dimensions, has ", x.dim());
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
}

void check_size(const Tensor& x, const char* name, int64_t dim, int64_t size) {
  STD_TORCH_CHECK(x.size(dim) == size, name, " must have ", size, " entries in dimension ", dim, ", has ", x.size(dim));
}

// Rows are read 16 bytes at a time.
void check_rows(const Tensor& x, const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(is_on_device(x), name, " must be on the device of the op");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " must have the dtype of q");
  STD_TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1, name, " must have 3 dimensions, the last of them dense");
  const bool is_aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.stride(0) % 8 == 0 && x.stride(1) % 8 == 0;
  STD_TORCH_CHECK(is_aligned, name, " must have rows that begin at multiples of 16 bytes");
}

// As an int, which is what the kernels count in.
int count(int64_t n, const char* name) {
  STD_TORCH_CHECK(n >= 0 && n < (int64_t{1} << 30), name, " is out of range: ", n);
  return static_cast<int>(n);
}

template <typename T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.data_ptr());
}
template <typename T>
T* written(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

std::tuple<Tensor, Tensor> tree_attention(Tensor q, Tensor k, Tensor v, Tensor masks, Tensor depths, Tensor key_depths,
                                          Tensor extent, int64_t window, double scale) {
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, "q must be float16 or bfloat16");
  check_rows(q, "q", dtype);
  check_rows(k, "k", dtype);
  check_rows(v, "v", dtype);
  const int64_t n = q.size(0), n_heads = q.size(1), dim = q.size(2), n_kv_heads = k.size(0);
  STD_TORCH_CHECK(dim == 64 || dim == 96 || dim == 128, "the head dimension must be 64, 96 or 128, is ", dim);
  STD_TORCH_CHECK(n > 0 && n_kv_heads > 0 && n_heads % n_kv_heads == 0, "heads of q must be a multiple of those of k");
  for (const auto& [x, name] : {std::pair<const Tensor&, const char*>(k, "k"), {v, "v"}}) {
    check_size(x, name, 0, n_kv_heads);
    check_size(x, name, 1, k.size(1));
    check_size(x, name, 2, dim);
  }
  check_dense(masks, "masks", ScalarType::Int, 2);
  check_size(masks, "masks", 0, n);
  check_dense(depths, "depths", ScalarType::Int, 1);
  check_size(depths, "depths", 0, n);
  check_dense(key_depths, "key_depths", ScalarType::Int, 1);
  const int64_t most_tree = key_depths.size(0);
  STD_TORCH_CHECK(most_tree <= 32 * masks.size(1), "masks must have a bit for each entry of key_depths");
  check_dense(extent, "extent", ScalarType::Int, 1);
  check_size(extent, "extent", 0, 2);
  STD_TORCH_CHECK(scale > 0, "the scale must be positive");
  const Device device(q);

  offload_rt::TreeAttention args{};
  args.q = q.data_ptr(), args.k = k.data_ptr(), args.v = v.data_ptr();
  args.masks = data<int32_t>(masks), args.depths = data<int32_t>(depths);
  args.key_depths = data<int32_t>(key_depths), args.extent = data<int32_t>(extent);
  args.q_row = q.stride(0), args.q_head = q.stride(1);
  args.k_head = k.stride(0), args.k_row = k.stride(1), args.v_head = v.stride(0), args.v_row = v.stride(1);
  args.n = count(n, "rows"), args.n_heads = count(n_heads, "heads"), args.group = count(n_heads / n_kv_heads, "group");
  args.head_dim = static_cast<int>(dim), args.most_tree = count(most_tree, "keys of the tree");
  args.words = count(masks.size(1), "words"), args.window = count(window, "window");
  args.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  const auto tiling = offload_rt::choose_tiling(count(n * args.group, "rows"), count(n_kv_heads, "heads"),
                                                count(k.size(1), "keys"), device.n_processors);
  args.n_splits = tiling.n_splits;
  const Tensor out = torch::stable::new_empty(q, {n, n_heads, dim});
  const Tensor lse = torch::stable::new_empty(q, {n, n_heads}, ScalarType::Float);
  args.out = out.data_ptr(), args.lse = written<float>(lse);
  std::optional<Tensor> partial, weights;
  if (args.n_splits > 1) {
    partial = torch::stable::new_empty(q, {args.n_splits, n, n_heads, dim}, ScalarType::Float);
    weights = torch::stable::new_empty(q, {args.n_splits, n, n_heads, 2}, ScalarType::Float);
    args.partial = written<float>(*partial), args.weights = written<float2>(*weights);
  }
  offload_rt::tree_attention(args, dtype == ScalarType::Half, tiling.rows, device.stream);
  return {out, lse};
}

std::tuple<Tensor, Tensor> tree_masks(Tensor parents) {
  check_dense(parents, "parents", ScalarType::Long, 1);
  const int64_t n = parents.size(0), words = (n + 31) / 32;
  STD_TORCH_CHECK(n > 0 && n <= offload_rt::kMostMaskedRows, "parents must have 1 to ", offload_rt::kMostMaskedRows,
                  " entries, has ", n);
  const Device device(parents);
  const Tensor masks = torch::stable::new_empty(parents, {n, words}, ScalarType::Int);
  const Tensor depths = torch::stable::new_empty(parents, {n}, ScalarType::Int);
  offload_rt::tree_masks({data<int64_t>(parents), written<int32_t>(masks), written<int32_t>(depths), count(n, "rows"),
                          count(words, "words")},
                         device.stream);
  return {masks, depths};
}

void commit_rows(Tensor keys, Tensor values, Tensor rows, int64_t first) {
  for (const auto& [x, name] : {std::pair<const Tensor&, const char*>(keys, "keys"), {values, "values"}}) {
    check_dense(x, name, keys.scalar_type(), 4);
    for (int64_t dim = 0; dim < 4; ++dim) check_size(x, name, dim, keys.size(dim));
    const bool is_aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.size(3) * x.element_size() % 16 == 0;
    STD_TORCH_CHECK(is_aligned, name, " must have rows of a multiple of 16 bytes");
  }
  check_dense(rows, "rows", ScalarType::Long, 1);
  const int64_t n_rows = rows.size(0), capacity = keys.size(2);
  STD_TORCH_CHECK(first >= 0 && first + n_rows <= capacity, "rows past the end of the cache");
  if (n_rows == 0 || keys.numel() == 0) return;
  const Device device(keys);
  offload_rt::CommitRows args{};
  args.keys = keys.data_ptr(), args.values = values.data_ptr(), args.rows = data<int64_t>(rows);
  args.n_planes = keys.size(0) * keys.size(1), args.capacity = capacity;
  args.n_vectors = count(keys.size(3) * static_cast<int64_t>(keys.element_size()) / 16, "width");
  args.n_rows = count(n_rows, "rows"), args.first = count(first, "first");
  offload_rt::commit_rows(args, device.stream);
}

Tensor verify(Tensor starts, Tensor children, Tensor tokens, Tensor is_sampled, Tensor row_of, Tensor draft_probs, Tensor target,
              Tensor uniforms, int64_t n_levels, bool independent, bool leaf_to_root) {
  check_dense(target, "target", ScalarType::Float, 2);
  check_dense(draft_probs, "draft_probs", ScalarType::Float, 2);
  check_size(draft_probs, "draft_probs", 1, target.size(1));
  check_dense(is_sampled, "is_sampled", ScalarType::Bool, 1);
  check_dense(uniforms, "uniforms", ScalarType::Double, 1);
  const int64_t n = target.size(0), vocabulary = target.size(1);
  check_size(is_sampled, "is_sampled", 0, n);
  check_size(uniforms, "uniforms", 0, n + 1);
  using Sized = std::tuple<const Tensor&, const char*, int64_t>;
  for (const auto& [x, name, size] : {Sized(starts, "starts", n + 1), Sized(children, "children", n - 1),
                                      Sized(tokens, "tokens", n), Sized(row_of, "row_of", n)}) {
    check_dense(x, name, ScalarType::Long, 1);
    check_size(x, name, 0, size);
  }
  STD_TORCH_CHECK(n_levels > 0 && n_levels <= offload_rt::kMostLevels, "a tree may have ", offload_rt::kMostLevels,
                  " levels, has ", n_levels);
  const Device device(target);

  const Tensor sums = torch::stable::new_empty(target, {draft_probs.size(0)}, ScalarType::Double);
  const Tensor rests = torch::stable::new_empty(target, {leaf_to_root ? n_levels : 1, vocabulary});
  const Tensor kept = torch::stable::new_empty(target, {n});
  const Tensor verdict = torch::stable::new_empty(target, {2}, ScalarType::Long);
  offload_rt::Verify args{};
  args.starts = data<int64_t>(starts), args.children = data<int64_t>(children), args.tokens = data<int64_t>(tokens);
  args.is_sampled = data<bool>(is_sampled), args.row_of = data<int64_t>(row_of), args.draft_probs = data<float>(draft_probs);
  args.target = data<float>(target), args.uniforms = data<double>(uniforms), args.sums = written<double>(sums);
  args.rests = written<float>(rests), args.kept = written<float>(kept), args.verdict = written<int64_t>(verdict);
  args.n = count(n, "nodes"), args.n_draft_probs = count(draft_probs.size(0), "draft_probs"), args.n_levels = count(n_levels, "levels");
  args.vocabulary = count(vocabulary, "vocabulary"), args.independent = independent, args.leaf_to_root = leaf_to_root;
  offload_rt::verify(args, device.stream);
  return verdict;
}

offload_rt::FloatKind float_kind(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return offload_rt::FloatKind::kFloat;
    case ScalarType::Half: return offload_rt::FloatKind::kHalf;
    case ScalarType::BFloat16: return offload_rt::FloatKind::kBFloat16;
    default: STD_TORCH_CHECK(false, name, " must be float32, float16 or bfloat16");
  }
}

// Codes of the right dtype and shape; returns the words or bytes of a row.
int64_t check_codes(const Tensor& codes, offload_rt::CodeKind kind, int64_t bits, int64_t n_rows, int64_t n_columns) {
  using offload_rt::CodeKind;
  STD_TORCH_CHECK(bits >= 1 && bits <= 8, "codes must have 1 to 8 bits, not ", bits);
  const bool is_nibble = kind == CodeKind::kFloat4 || kind == CodeKind::kNormal4;
  const bool is_byte = is_nibble || kind == CodeKind::kFloat8;
  check_dense(codes, "codes", kind == CodeKind::kInt8 ? ScalarType::Char : is_byte ? ScalarType::Byte : ScalarType::Int, 2);
  const int64_t width = kind == CodeKind::kRows  ? (n_columns * bits + 31) / 32
                        : kind == CodeKind::kAwq ? (n_columns + 7) / 8
                        : is_nibble              ? (n_columns + 1) / 2
                                                 : n_columns;
  check_size(codes, "codes", 0, kind == CodeKind::kColumns ? (n_rows * bits + 31) / 32 : n_rows);
  check_size(codes, "codes", 1, width);
  return width;
}

void dequantize(Tensor codes, Tensor scales, std::optional<Tensor> zeros, std::optional<Tensor> groups, int64_t kind, int64_t bits,
                int64_t block_rows, int64_t block_columns, int64_t offset, Tensor out) {
  STD_TORCH_CHECK(kind >= 0 && kind <= static_cast<int64_t>(offload_rt::CodeKind::kFloat8), "unknown kind of codes: ", kind);
  STD_TORCH_CHECK(block_rows > 0 && block_columns > 0, "blocks must not be empty");
  check_dense(out, "out", out.scalar_type(), 2);
  check_dense(scales, "scales", scales.scalar_type(), 2);
  offload_rt::Dequantize args{};
  args.kind = static_cast<offload_rt::CodeKind>(kind);
  args.out_kind = float_kind(out, "out"), args.scale_kind = float_kind(scales, "scales");
  args.n_rows = out.size(0), args.n_columns = count(out.size(1), "columns"), args.n_scales = count(scales.size(1), "scales");
  args.row_size = check_codes(codes, args.kind, bits, args.n_rows, args.n_columns);
  const bool groups_rows = args.kind == offload_rt::CodeKind::kColumns || args.kind == offload_rt::CodeKind::kAwq;
  if (!groups || !groups_rows) check_size(scales, "scales", 0, (out.size(0) + block_rows - 1) / block_rows);
  if (!groups || groups_rows) check_size(scales, "scales", 1, (out.size(1) + block_columns - 1) / block_columns);
  if (zeros) {
    check_dense(*zeros, "zeros", ScalarType::Int, 2);
    for (int64_t dim = 0; dim < 2; ++dim) check_size(*zeros, "zeros", dim, scales.size(dim));
    args.zeros = data<int32_t>(*zeros);
  }
  if (groups) {
    check_dense(*groups, "groups", ScalarType::Int, 1);
    check_size(*groups, "groups", 0, out.size(groups_rows ? 0 : 1));
    args.groups = data<int32_t>(*groups);
  }
  if (out.numel() == 0) return;
  const Device device(out);
  args.codes = codes.data_ptr(), args.scales = scales.data_ptr(), args.out = out.data_ptr();
  args.bits = static_cast<int>(bits), args.offset = count(offset, "offset");
  args.block_rows = count(block_rows, "rows of a block"), args.block_columns = count(block_columns, "columns of a block");
  args.is_aligned = out.size(1) % 8 == 0 && reinterpret_cast<uintptr_t>(out.data_ptr()) % 16 == 0;
  offload_rt::dequantize(args, device.stream);
}

}  // namespace

// The name is an argument of its own so that it is expanded before it is made a string.
#define OFFLOAD_RT_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define OFFLOAD_RT_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

#ifdef CUDA_ON_CPU
#define OFFLOAD_RT_NAME offload_rt_on_cpu
#define OFFLOAD_RT_KEY CPU
#else
#define OFFLOAD_RT_NAME offload_rt
#define OFFLOAD_RT_KEY CUDA
#endif

OFFLOAD_RT_LIBRARY(OFFLOAD_RT_NAME, m) {
  m.def("tree_attention(Tensor q, Tensor k, Tensor v, Tensor masks, Tensor depths, Tensor key_depths, Tensor extent, "
        "int window, float scale) -> (Tensor out, Tensor lse)");
  m.def("tree_masks(Tensor parents) -> (Tensor masks, Tensor depths)");
  m.def("commit_rows(Tensor(a!) keys, Tensor(b!) values, Tensor rows, int first) -> ()");
  m.def("verify(Tensor starts, Tensor children, Tensor tokens, Tensor is_sampled, Tensor row_of, Tensor draft_probs, Tensor target, "
        "Tensor uniforms, int n_levels, bool independent, bool leaf_to_root) -> Tensor");
  m.def("dequantize(Tensor codes, Tensor scales, Tensor? zeros, Tensor? groups, int kind, int bits, int block_rows, "
        "int block_columns, int offset, Tensor(a!) out) -> ()");
}

OFFLOAD_RT_LIBRARY_IMPL(OFFLOAD_RT_NAME, OFFLOAD_RT_KEY, m) {
  m.impl("tree_attention", TORCH_BOX(&tree_attention));
  m.impl("tree_masks", TORCH_BOX(&tree_masks));
  m.impl("commit_rows", TORCH_BOX(&commit_rows));
  m.impl("verify", TORCH_BOX(&verify));
  m.impl("dequantize", TORCH_BOX(&dequantize));
}
