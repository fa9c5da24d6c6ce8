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
void check_rows(const Tensor& x, const char* name, ScalarType dtype, int64_t n_dims = 3) {
  STD_TORCH_CHECK(is_on_device(x), name, " must be on the device of the op");
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " must have the dtype of the first tensor");
  STD_TORCH_CHECK(x.dim() == n_dims && x.stride(n_dims - 1) == 1, name, " must have ", n_dims, " dimensions, the last of them dense");
  bool is_aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim + 1 < n_dims; ++dim) is_aligned = is_aligned && x.stride(dim) % 8 == 0;
  STD_TORCH_CHECK(is_aligned, name, " must have rows that begin at multiples of 16 bytes");
}

// Whether the op computes in float16, rather than bfloat16.
bool check_half(const Tensor& x, const char* name) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, name, " must be float16 or bfloat16");
  return dtype == ScalarType::Half;
}

offload_rt::FloatKind float_kind(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return offload_rt::FloatKind::kFloat;
    case ScalarType::Half: return offload_rt::FloatKind::kHalf;
    case ScalarType::BFloat16: return offload_rt::FloatKind::kBFloat16;
    default: STD_TORCH_CHECK(false, name, " must be float32, float16 or bfloat16");
  }
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

std::tuple<Tensor, Tensor> merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) {
  check_dense(out_a, "out_a", out_a.scalar_type(), 3);
  check_dense(out_b, "out_b", out_b.scalar_type(), 3);
  for (const auto& [x, name] : {std::pair<const Tensor&, const char*>(lse_a, "lse_a"), {lse_b, "lse_b"}}) {
    check_dense(x, name, ScalarType::Float, 2);
    for (int64_t dim = 0; dim < 2; ++dim) check_size(x, name, dim, out_a.size(dim));
  }
  for (int64_t dim = 0; dim < 3; ++dim) check_size(out_b, "out_b", dim, out_a.size(dim));
  const Device device(out_a);
  const Tensor out = torch::stable::empty_like(out_a), lse = torch::stable::empty_like(lse_a);
  offload_rt::MergeAttention args{};
  args.out_a = out_a.data_ptr(), args.out_b = out_b.data_ptr(), args.out = out.data_ptr();
  args.lse_a = data<float>(lse_a), args.lse_b = data<float>(lse_b), args.lse = written<float>(lse);
  args.n_rows = lse.numel(), args.width = count(out.size(2), "width");
  args.kind_a = float_kind(out_a, "out_a"), args.kind_b = float_kind(out_b, "out_b");
  if (args.n_rows > 0) offload_rt::merge_attention(args, device.stream);
  return {out, lse};
}

#ifdef CUDA_ON_CPU
void* on_device(const Tensor& x) { return x.data_ptr(); }
#else
// Where kernels see a tensor of the device, or of the host's pinned memory: registered memory may have another address there.
void* on_device(const Tensor& x) {
  cudaPointerAttributes found{};
  check_cuda(cudaPointerGetAttributes(&found, x.data_ptr()), "address of a tensor");
  STD_TORCH_CHECK(found.devicePointer != nullptr, "the host's tensor must be pinned");
  return found.devicePointer;
}
#endif

void transfer(Tensor to, Tensor from) {
  STD_TORCH_CHECK(to.is_contiguous() && from.is_contiguous(), "both tensors must be contiguous");
  const int64_t nbytes = from.numel() * static_cast<int64_t>(from.element_size());
  STD_TORCH_CHECK(to.numel() * static_cast<int64_t>(to.element_size()) == nbytes, "both tensors must have as many bytes");
  if (nbytes == 0) return;
  const Device device(is_on_device(to) ? to : from);
  offload_rt::transfer({on_device(to), on_device(from), nbytes, 0, 0}, device.stream);
}

void commit_rows(Tensor keys, Tensor values, Tensor rows, int64_t first) {
  for (const auto& [x, name] : {std::pair<const Tensor&, const char*>(keys, "keys"), {values, "values"}}) {
    check_dense(x, name, keys.scalar_type(), 4);
    for (int64_t dim = 0; dim < 4; ++dim) check_size(x, name, dim, keys.size(dim));
    const bool is_aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.size(3) * x.element_size() % 16 == 0;
    STD_TORCH_CHECK(is_aligned, name, " must have rows of a multiple of 16 bytes");
  }
  STD_TORCH_CHECK(rows.is_cpu() && rows.scalar_type() == ScalarType::Long && rows.dim() == 1 && rows.is_contiguous(),
                  "rows must be a vector of int64 on the host");
  const int64_t n_rows = rows.size(0), capacity = keys.size(2);
  if (n_rows == 0 || keys.numel() == 0) return;
  STD_TORCH_CHECK(first >= 0 && first + data<int64_t>(rows)[n_rows - 1] < capacity, "rows past the end of the cache");
  const Device device(keys);
  offload_rt::CommitRows args{};
  args.keys = keys.data_ptr(), args.values = values.data_ptr();
  args.n_planes = keys.size(0) * keys.size(1), args.capacity = capacity;
  args.n_vectors = count(keys.size(3) * static_cast<int64_t>(keys.element_size()) / 16, "width");
  // Rows go ahead only, and those of an earlier launch before those of a later one.
  for (int64_t start = 0; start < n_rows; start += offload_rt::kMostCommitted) {
    args.n_rows = static_cast<int>(std::min<int64_t>(n_rows - start, offload_rt::kMostCommitted));
    args.first = count(first + start, "first");
    for (int i = 0; i < args.n_rows; ++i) args.rows[i] = count(data<int64_t>(rows)[start + i] - start, "row");
    offload_rt::commit_rows(args, device.stream);
  }
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

  constexpr int64_t kChildDoubles = sizeof(offload_rt::Child) / sizeof(double);
  const Tensor weighed = torch::stable::new_empty(target, {n, kChildDoubles}, ScalarType::Double);
  const Tensor sums = torch::stable::new_empty(target, {2, offload_rt::kMostVerifyBlocks}, ScalarType::Double);
  const Tensor rests = torch::stable::new_empty(target, {leaf_to_root ? 2 * n_levels : 2, vocabulary});
  const Tensor verdict = torch::stable::new_empty(target, {2}, ScalarType::Long);
  offload_rt::Verify args{};
  args.starts = data<int64_t>(starts), args.children = data<int64_t>(children), args.tokens = data<int64_t>(tokens);
  args.is_sampled = data<bool>(is_sampled), args.row_of = data<int64_t>(row_of), args.draft_probs = data<float>(draft_probs);
  args.target = data<float>(target), args.uniforms = data<double>(uniforms), args.sums = written<double>(sums);
  args.weighed = written<offload_rt::Child>(weighed), args.rests = written<float>(rests), args.verdict = written<int64_t>(verdict);
  args.n = count(n, "nodes"), args.n_levels = count(n_levels, "levels");
  args.vocabulary = count(vocabulary, "vocabulary"), args.independent = independent, args.leaf_to_root = leaf_to_root;
  offload_rt::verify(args, device.stream);
  return verdict;
}

// Codes of the right dtype and shape; returns the words or bytes of a row.
int64_t check_codes(const Tensor& codes, offload_rt::CodeKind kind, int64_t bits, int64_t n_rows, int64_t n_columns,
                    const char* name = "codes") {
  using offload_rt::CodeKind;
  STD_TORCH_CHECK(bits >= 1 && bits <= 8, "codes must have 1 to 8 bits, not ", bits);
  const bool is_nibble = kind == CodeKind::kFloat4 || kind == CodeKind::kNormal4;
  const bool is_byte = is_nibble || kind == CodeKind::kFloat8;
  check_dense(codes, name, kind == CodeKind::kInt8 ? ScalarType::Char : is_byte ? ScalarType::Byte : ScalarType::Int, 2);
  const int64_t width = kind == CodeKind::kRows  ? (n_columns * bits + 31) / 32
                        : kind == CodeKind::kAwq ? (n_columns + 7) / 8
                        : is_nibble              ? (n_columns + 1) / 2
                                                 : n_columns;
  check_size(codes, name, 0, kind == CodeKind::kColumns ? (n_rows * bits + 31) / 32 : n_rows);
  check_size(codes, name, 1, width);
  return width;
}

// Zero points in the grid of the scales, packed along the outputs; returns the words or bytes of a row.
int64_t check_zeros(const Tensor& zeros, offload_rt::CodeKind kind, int64_t bits, const Tensor& scales) {
  using offload_rt::CodeKind;
  const bool is_packed = kind == CodeKind::kRows || kind == CodeKind::kColumns || kind == CodeKind::kAwq;
  STD_TORCH_CHECK(is_packed || kind == CodeKind::kInt8, "these codes have no zeros");
  const CodeKind packed = kind == CodeKind::kRows ? CodeKind::kColumns : kind == CodeKind::kColumns ? CodeKind::kRows : kind;
  return check_codes(zeros, packed, bits, scales.size(0), scales.size(1), "zeros");
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
    args.zero_row_size = check_zeros(*zeros, args.kind, bits, scales);
    args.zeros = zeros->data_ptr();
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

// Of matrices behind each other, at any distance; each is dense. Returns the first.
Tensor first_of(const Tensor& stack, const char* name) {
  STD_TORCH_CHECK(stack.dim() == 3 && stack.size(0) > 0, name, " must have 3 dimensions, the first of matrices");
  return torch::stable::select(stack, 0, 0);
}

Tensor few_rows(Tensor x, std::optional<Tensor> rows, std::optional<Tensor> ends, Tensor codes, std::optional<Tensor> scales,
                std::optional<Tensor> zeros, std::optional<Tensor> bias, int64_t kind, int64_t block_out, int64_t block_in,
                int64_t offset) {
  using offload_rt::CodeKind;
  STD_TORCH_CHECK(kind >= 0 && kind <= static_cast<int64_t>(CodeKind::kDense), "unknown kind of codes: ", kind);
  offload_rt::FewRows args{};
  args.kind = static_cast<CodeKind>(kind);
  STD_TORCH_CHECK(args.kind != CodeKind::kAwq && args.kind != CodeKind::kNormal4, "few_rows has no kernel for these codes");
  check_half(x, "x");
  check_rows(x, "x", x.scalar_type(), 2);
  const bool is_transposed = args.kind == CodeKind::kColumns, is_dense = args.kind == CodeKind::kDense;
  const Tensor first = first_of(codes, "codes");
  const int64_t n_in = x.size(1), n_out = first.size(is_transposed ? 1 : 0), n_matrices = codes.size(0);
  STD_TORCH_CHECK(n_in % offload_rt::kFewInputs == 0, "x must have a multiple of ", offload_rt::kFewInputs, " columns, has ", n_in);
  STD_TORCH_CHECK(n_out <= offload_rt::kMostFewOutputs, "codes may have ", offload_rt::kMostFewOutputs, " outputs, have ", n_out);
  if (rows) {
    check_dense(*rows, "rows", ScalarType::Long, 1);
    args.rows = data<int64_t>(*rows);
  }
  const int64_t n = rows ? rows->size(0) : x.size(0);
  if (ends) {
    check_dense(*ends, "ends", ScalarType::Int, 1);
    check_size(*ends, "ends", 0, n_matrices);
    args.ends = data<int32_t>(*ends);
  } else {
    check_size(codes, "codes", 0, 1);
    STD_TORCH_CHECK(n <= offload_rt::kMostFewRows, "x may have ", offload_rt::kMostFewRows, " rows, has ", n);
  }
  if (is_dense) {
    check_dense(first, "codes", x.scalar_type(), 2);
    check_size(first, "codes", 1, n_in);
  } else {
    check_codes(first, args.kind, 4, is_transposed ? n_in : n_out, is_transposed ? n_out : n_in);
  }
  args.code_stride = codes.stride(0) * static_cast<int64_t>(codes.element_size());
  const int64_t alignment = is_dense ? 16 : 8;
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(codes.data_ptr()) % alignment == 0 && args.code_stride % alignment == 0,
                  "codes must begin at a multiple of ", alignment, " bytes");
  STD_TORCH_CHECK(block_out > 0 && block_in > 0 && (block_in % 8 == 0 || block_in >= n_in), "blocks must have a multiple of 8 inputs");
  STD_TORCH_CHECK(scales.has_value() != is_dense, "codes need scales, and other weights have none");
  if (scales) {
    const Tensor grid = first_of(*scales, "scales");
    check_size(*scales, "scales", 0, n_matrices);
    check_dense(grid, "scales", scales->scalar_type(), 2);
    check_size(grid, "scales", is_transposed ? 1 : 0, (n_out + block_out - 1) / block_out);
    check_size(grid, "scales", is_transposed ? 0 : 1, (n_in + block_in - 1) / block_in);
    if (zeros) {
      check_size(*zeros, "zeros", 0, n_matrices);
      check_zeros(first_of(*zeros, "zeros"), args.kind, 4, grid);
      args.zeros = zeros->data_ptr(), args.zero_stride = zeros->stride(0) * static_cast<int64_t>(zeros->element_size());
    }
    args.scales = scales->data_ptr(), args.scale_stride = scales->stride(0), args.n_scales = count(grid.size(1), "scales");
    const bool is_power = scales->scalar_type() == ScalarType::Byte;
    args.scale_kind = is_power ? offload_rt::FloatKind::kPowerOfTwo : float_kind(*scales, "scales");
  }
  if (bias) {
    check_dense(*bias, "bias", x.scalar_type(), 2);
    check_size(*bias, "bias", 0, n_matrices);
    check_size(*bias, "bias", 1, n_out);
    args.bias = bias->data_ptr();
  }
  const Device device(x);
  const Tensor y = torch::stable::new_empty(x, {n, n_out});
  args.kind_of_x = float_kind(x, "x");
  args.x = x.data_ptr(), args.codes = codes.data_ptr(), args.y = y.data_ptr();
  args.x_row = x.stride(0), args.n_rows = count(n, "rows"), args.n_out = count(n_out, "outputs");
  args.n_in = count(n_in, "inputs"), args.n_matrices = count(n_matrices, "matrices"), args.offset = count(offset, "offset");
  args.block_out = count(block_out, "outputs of a block"), args.block_in = count(block_in, "inputs of a block");
  if (y.numel() > 0) offload_rt::few_rows(args, device.stream);
  return y;
}

void lossless_decode(Tensor block, int64_t n_chunks, Tensor out) {
  check_dense(block, "block", ScalarType::Byte, 1);
  check_dense(out, "out", ScalarType::Byte, 1);
  const int64_t table = n_chunks * static_cast<int64_t>(sizeof(offload_rt::LosslessChunk));
  STD_TORCH_CHECK(n_chunks >= 0 && table <= block.size(0), "block must hold ", n_chunks, " chunks");
  for (const Tensor& x : {block, out})
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0, "blocks must begin at multiples of 16 bytes");
  if (n_chunks == 0) return;
  const Device device(out);
  offload_rt::lossless_decode({data<uint8_t>(block), written<uint8_t>(out)}, count(n_chunks, "chunks"), device.stream);
}

void dequantize_blocks(Tensor blocks, int64_t kind, Tensor out) {
  constexpr int64_t n_kinds = sizeof(offload_rt::kBlockLayouts) / sizeof(offload_rt::BlockLayout);
  STD_TORCH_CHECK(kind >= 0 && kind < n_kinds, "unknown kind of blocks: ", kind);
  const offload_rt::BlockLayout& layout = offload_rt::kBlockLayouts[kind];
  check_dense(out, "out", out.scalar_type(), 2);
  check_dense(blocks, "blocks", ScalarType::Byte, 2);
  STD_TORCH_CHECK(out.size(1) % layout.n == 0, "out must have a multiple of ", layout.n, " columns");
  check_size(blocks, "blocks", 0, out.size(0));
  check_size(blocks, "blocks", 1, out.size(1) / layout.n * layout.size);
  offload_rt::DequantizeBlocks args{};
  args.kind = static_cast<offload_rt::BlockKind>(kind), args.layout = layout, args.out_kind = float_kind(out, "out");
  args.n_rows = out.size(0), args.n_columns = count(out.size(1), "columns");
  if (out.numel() == 0) return;
  const Device device(out);
  args.blocks = data<uint8_t>(blocks), args.out = out.data_ptr();
  args.is_aligned = reinterpret_cast<uintptr_t>(out.data_ptr()) % 16 == 0;
  offload_rt::dequantize_blocks(args, device.stream);
}

Tensor normed(const Tensor& x, const Tensor* delta, const Tensor& weight, double eps) {
  const bool is_half = check_half(x, "x");
  const int64_t n_dims = x.dim(), width = x.size(n_dims - 1);
  STD_TORCH_CHECK(n_dims == 2 || n_dims == 3, "x must have 2 or 3 dimensions, has ", n_dims);
  check_rows(x, "x", x.scalar_type(), n_dims);
  STD_TORCH_CHECK(width > 0 && width % 8 == 0 && width <= offload_rt::kMostNormed, "x must have rows of a multiple of 8 numbers, ",
                  offload_rt::kMostNormed, " at most, has ", width);
  check_rows(weight, "weight", x.scalar_type(), 1);
  check_size(weight, "weight", 0, width);
  offload_rt::RmsNorm args{};
  if (delta != nullptr) {
    check_rows(*delta, "delta", x.scalar_type(), 2);
    for (int64_t dim = 0; dim < n_dims; ++dim) check_size(*delta, "delta", dim, x.size(dim));
    args.delta = delta->data_ptr(), args.delta_row = delta->stride(0);
  }
  const Device device(x);
  args.n = count(x.size(0), "rows"), args.n_heads = n_dims == 3 ? count(x.size(1), "heads") : 1;
  const Tensor out = n_dims == 3 ? torch::stable::new_empty(x, {args.n, args.n_heads, width})
                                 : torch::stable::new_empty(x, {args.n, width});
  args.x = x.data_ptr(), args.weight = weight.data_ptr(), args.out = out.data_ptr();
  args.x_row = x.stride(0), args.x_head = n_dims == 3 ? x.stride(1) : 0;
  args.width = static_cast<int>(width), args.eps = static_cast<float>(eps);
  if (out.numel() > 0) offload_rt::rms_norm(args, is_half, device.stream);
  return out;
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) { return normed(x, nullptr, weight, eps); }

Tensor add_rms_norm(Tensor x, Tensor delta, Tensor weight, double eps) {
  STD_TORCH_CHECK(x.dim() == 2, "x must have 2 dimensions, has ", x.dim());
  return normed(x, &delta, weight, eps);
}

Tensor rotate_and_store(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor keys, Tensor values,
                        std::optional<Tensor> rows, int64_t first) {
  const bool is_half = check_half(q, "q");
  check_rows(q, "q", q.scalar_type());
  const int64_t n = q.size(0), n_heads = q.size(1), dim = q.size(2), n_kv_heads = k.size(1), capacity = keys.size(1);
  STD_TORCH_CHECK(dim > 0 && dim % 16 == 0, "the head dimension must be a multiple of 16, is ", dim);
  for (const auto& [x, name] : {std::pair<const Tensor&, const char*>(k, "k"), {v, "v"}}) {
    check_rows(x, name, q.scalar_type());
    check_size(x, name, 0, n);
    check_size(x, name, 1, n_kv_heads);
    check_size(x, name, 2, dim);
  }
  for (const auto& [x, name] : {std::pair<const Tensor&, const char*>(cos, "cos"), {sin, "sin"}}) {
    check_rows(x, name, q.scalar_type(), 2);
    check_size(x, name, 0, n);
    check_size(x, name, 1, dim);
  }
  for (const auto& [x, name] : {std::pair<const Tensor&, const char*>(keys, "keys"), {values, "values"}}) {
    check_rows(x, name, q.scalar_type());
    check_dense(x, name, q.scalar_type(), 3);
    check_size(x, name, 0, n_kv_heads);
    check_size(x, name, 1, capacity);
    check_size(x, name, 2, dim);
  }
  if (rows.has_value()) {
    check_dense(*rows, "rows", ScalarType::Long, 1);
    check_size(*rows, "rows", 0, n);
  } else {
    STD_TORCH_CHECK(first >= 0 && first + n <= capacity, "rows past the end of the cache");
  }
  const Device device(q);
  const Tensor out = torch::stable::new_empty(q, {n, n_heads, dim});
  offload_rt::RotateAndStore args{};
  args.q = q.data_ptr(), args.k = k.data_ptr(), args.v = v.data_ptr(), args.cos = cos.data_ptr(), args.sin = sin.data_ptr();
  args.keys = keys.data_ptr(), args.values = values.data_ptr(), args.out = out.data_ptr();
  args.rows = rows.has_value() ? data<int64_t>(*rows) : nullptr, args.first = first;
  args.q_row = q.stride(0), args.q_head = q.stride(1), args.k_row = k.stride(0), args.k_head = k.stride(1);
  args.v_row = v.stride(0), args.v_head = v.stride(1), args.cos_row = cos.stride(0), args.sin_row = sin.stride(0);
  args.store_head = keys.stride(0), args.n = count(n, "rows"), args.n_heads = count(n_heads, "heads");
  args.n_kv_heads = count(n_kv_heads, "heads"), args.head_dim = count(dim, "head dimension");
  if (n > 0) offload_rt::rotate_and_store(args, is_half, device.stream);
  return out;
}

Tensor silu_mul(Tensor gate, Tensor up) {
  const bool is_half = check_half(gate, "gate");
  check_rows(gate, "gate", gate.scalar_type(), 2);
  check_rows(up, "up", gate.scalar_type(), 2);
  for (int64_t dim = 0; dim < 2; ++dim) check_size(up, "up", dim, gate.size(dim));
  STD_TORCH_CHECK(gate.size(1) % 8 == 0, "gate must have rows of a multiple of 8 numbers, has ", gate.size(1));
  const Device device(gate);
  const Tensor out = torch::stable::new_empty(gate, {gate.size(0), gate.size(1)});
  offload_rt::SiluMul args{};
  args.gate = gate.data_ptr(), args.up = up.data_ptr(), args.out = out.data_ptr();
  args.gate_row = gate.stride(0), args.up_row = up.stride(0);
  args.n = count(gate.size(0), "rows"), args.width = count(gate.size(1), "width");
  if (out.numel() > 0) offload_rt::silu_mul(args, is_half, device.stream);
  return out;
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
  m.def("merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)");
  m.def("transfer(Tensor(a!) target, Tensor source) -> ()");
  m.def("commit_rows(Tensor(a!) keys, Tensor(b!) values, Tensor rows, int first) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor(a!) x, Tensor delta, Tensor weight, float eps) -> Tensor");
  m.def("rotate_and_store(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
        "Tensor? rows, int first) -> Tensor");
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("verify(Tensor starts, Tensor children, Tensor tokens, Tensor is_sampled, Tensor row_of, Tensor draft_probs, Tensor target, "
        "Tensor uniforms, int n_levels, bool independent, bool leaf_to_root) -> Tensor");
  m.def("dequantize(Tensor codes, Tensor scales, Tensor? zeros, Tensor? groups, int kind, int bits, int block_rows, "
        "int block_columns, int offset, Tensor(a!) out) -> ()");
  m.def("few_rows(Tensor x, Tensor? rows, Tensor? ends, Tensor codes, Tensor? scales, Tensor? zeros, Tensor? bias, int kind, "
        "int block_out, int block_in, int offset) -> Tensor");
  m.def("lossless_decode(Tensor block, int n_chunks, Tensor(a!) out) -> ()");
  m.def("dequantize_blocks(Tensor blocks, int kind, Tensor(a!) out) -> ()");
}

OFFLOAD_RT_LIBRARY_IMPL(OFFLOAD_RT_NAME, OFFLOAD_RT_KEY, m) {
  m.impl("tree_attention", TORCH_BOX(&tree_attention));
  m.impl("merge_attention", TORCH_BOX(&merge_attention));
  m.impl("transfer", TORCH_BOX(&transfer));
  m.impl("commit_rows", TORCH_BOX(&commit_rows));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("rotate_and_store", TORCH_BOX(&rotate_and_store));
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("verify", TORCH_BOX(&verify));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("few_rows", TORCH_BOX(&few_rows));
  m.impl("lossless_decode", TORCH_BOX(&lossless_decode));
  m.impl("dequantize_blocks", TORCH_BOX(&dequantize_blocks));
}
