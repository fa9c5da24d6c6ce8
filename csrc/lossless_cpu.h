// Decoding and digests for one instruction set: included once for each, in namespace ISA, with exponents() of that set.
// See offload_rt/ops/lossless.py for the format. Nothing here trusts a chunk: its escapes are followed by 88 bytes for every
// 64 weights, so that however many escapes its planes name, they are read inside of it.
namespace ISA {

inline uint64_t digest(const uint8_t* bytes, int64_t n) {
  constexpr int kLanes = 64;
  uint32_t lanes[kLanes], words[kLanes];
  for (int l = 0; l < kLanes; ++l) lanes[l] = kPrime * static_cast<uint32_t>(l + 1);
  for (int64_t at = 0; at < n; at += sizeof(words)) {
    if (n - at < static_cast<int64_t>(sizeof(words))) {
      memset(words, 0, sizeof(words));
      memcpy(words, bytes + at, n - at);
    } else {
      memcpy(words, bytes + at, sizeof(words));
    }
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t mixed = lanes[l] ^ words[l];
      lanes[l] = (mixed << 13 | mixed >> 19) * kPrime;
    }
  }
  uint64_t sum = static_cast<uint64_t>(n);
  for (int l = 0; l < kLanes; ++l) {
    sum = (sum ^ lanes[l]) * kPrime64;
    sum ^= sum >> 29;
  }
  return sum;
}

// 64 weights from their signs and mantissas, and their other bits.
template <int kind>
inline void assemble(const uint8_t* signs, const uint8_t* others, uint8_t* out) {
  uint16_t words[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    const uint16_t sign = signs[i], other = others[i];
    words[i] = kind == kHalf ? (sign & 0x80) << 8 | (other & 0xf8) << 7 | (sign & 0x7f) << 3 | (other & 7)
                             : (sign & 0x80) << 8 | other << 7 | (sign & 0x7f);
  }
  if (kind != kFloat) {
    memcpy(out, words, sizeof(words));
    return;
  }
  uint32_t wide[kGroup];
  for (int i = 0; i < kGroup; ++i) wide[i] = static_cast<uint32_t>(words[i]) << 16;
  memcpy(out, wide, sizeof(wide));
}

template <int kind>
bool decode(const uint8_t* chunk, int64_t nbytes, int64_t n, uint8_t* out) {
  constexpr int64_t kSize = kind == kFloat ? 4 : 2;
  const int64_t n_groups = (n + kGroup - 1) / kGroup, n_blocks = (n_groups + kBlockGroups - 1) / kBlockGroups;
  const uint8_t* signs = chunk + nbytes - kGroupBytes * n_groups;
  const uint8_t *planes = signs + kGroup * n_groups, *starts = chunk + 8, *escapes = starts + 4 * (n_blocks + 1);
  int64_t n_escapes = 0;
  for (int64_t g = 0; g < n_groups; ++g) {
    if (g % kBlockGroups == 0 && load<uint32_t>(starts + g / kBlockGroups * 4) != n_escapes) return false;
    alignas(64) uint8_t others[kGroup];
    n_escapes += exponents(planes + 24 * g, chunk, escapes + n_escapes, others);
    uint8_t* to = out + g * kGroup * kSize;
    if ((g + 1) * kGroup <= n) {
      assemble<kind>(signs + kGroup * g, others, to);
    } else {
      uint8_t last[kGroup * kSize];
      assemble<kind>(signs + kGroup * g, others, last);
      memcpy(to, last, (n - g * kGroup) * kSize);
    }
  }
  return load<uint32_t>(starts + n_blocks * 4) == n_escapes && escapes + n_escapes <= signs;
}

inline bool decode_kind(const uint8_t* chunk, int64_t nbytes, int kind, int64_t n, uint8_t* out) {
  if (kind == kHalf) return decode<kHalf>(chunk, nbytes, n, out);
  if (kind == kFloat) return decode<kFloat>(chunk, nbytes, n, out);
  return decode<kBFloat16>(chunk, nbytes, n, out);
}

}  // namespace ISA
