#include "cpu/embedding/embedding.h"

#include "bindings/bindings.h"

#ifdef VLMKERNELS_WITH_CUDA
#include "cuda/embedding/embedding.h"
#endif

namespace vlmk {
namespace {

EmbeddingParams embedding_params(uintptr_t ids, uintptr_t visual_index, uintptr_t table,
                                 uintptr_t visual, uintptr_t out, int64_t first, int64_t rows,
                                 int64_t hidden, int64_t vocab_start, int64_t vocab_rows,
                                 int64_t visual_rows, bool partial, int table_dtype,
                                 int visual_dtype, int out_dtype) {
  return {pointer<const int64_t>(ids),
          pointer<const int32_t>(visual_index),
          pointer<const void>(table),
          pointer<const void>(visual),
          pointer<void>(out),
          first,
          rows,
          hidden,
          vocab_start,
          vocab_rows,
          visual_rows,
          partial,
          static_cast<DType>(table_dtype),
          static_cast<DType>(visual_dtype),
          static_cast<DType>(out_dtype)};
}

EmbeddingAddParams embedding_add_params(uintptr_t visual_index, uintptr_t visual, uintptr_t out,
                                        int64_t first, int64_t rows, int64_t hidden,
                                        int64_t visual_rows, int dtype) {
  return {pointer<const int32_t>(visual_index),
          pointer<const void>(visual),
          pointer<void>(out),
          first,
          rows,
          hidden,
          visual_rows,
          static_cast<DType>(dtype)};
}

EmbeddingGatherParams embedding_gather_params(uintptr_t visual_index, uintptr_t grad,
                                              uintptr_t inverse, uintptr_t dvisual, int64_t first,
                                              int64_t rows, int64_t hidden, int64_t visual_rows,
                                              int grad_dtype, int dvisual_dtype) {
  return {pointer<const int32_t>(visual_index),
          pointer<const void>(grad),
          pointer<int32_t>(inverse),
          pointer<void>(dvisual),
          first,
          rows,
          hidden,
          visual_rows,
          static_cast<DType>(grad_dtype),
          static_cast<DType>(dvisual_dtype)};
}

EmbeddingSortParams embedding_sort_params(uintptr_t ids, uintptr_t visual_index, uintptr_t keys,
                                          uintptr_t order, int64_t first, int64_t rows,
                                          int64_t vocab_start, int64_t vocab_rows,
                                          int64_t padding_idx) {
  return {pointer<const int64_t>(ids),
          pointer<const int32_t>(visual_index),
          pointer<int64_t>(keys),
          pointer<int64_t>(order),
          first,
          rows,
          vocab_start,
          vocab_rows,
          padding_idx};
}

EmbeddingReduceParams embedding_reduce_params(uintptr_t keys, uintptr_t order, uintptr_t grad,
                                              uintptr_t dweight, int64_t count, int64_t hidden,
                                              int64_t vocab_rows, int grad_dtype, int dweight_dtype,
                                              bool accumulate) {
  return {pointer<const int64_t>(keys),
          pointer<const int64_t>(order),
          pointer<const void>(grad),
          pointer<void>(dweight),
          count,
          hidden,
          vocab_rows,
          static_cast<DType>(grad_dtype),
          static_cast<DType>(dweight_dtype),
          accumulate};
}

}  // namespace

void register_embedding(py::module_& m) {
  // `device...` is the stream on CUDA, and nothing on the CPU.
  const auto forward = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "ids"_a, "visual_index"_a, "table"_a, "visual"_a, "out"_a, "first"_a,
          "rows"_a, "hidden"_a, "vocab_start"_a, "vocab_rows"_a, "visual_rows"_a, "partial"_a,
          "table_dtype"_a, "visual_dtype"_a, "out_dtype"_a, device..., VLMK_NO_GIL);
  };
  const auto add = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "visual_index"_a, "visual"_a, "out"_a, "first"_a, "rows"_a, "hidden"_a,
          "visual_rows"_a, "dtype"_a, device..., VLMK_NO_GIL);
  };
  const auto gather = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "visual_index"_a, "grad"_a, "inverse"_a, "dvisual"_a, "first"_a, "rows"_a,
          "hidden"_a, "visual_rows"_a, "grad_dtype"_a, "dvisual_dtype"_a, device..., VLMK_NO_GIL);
  };
  const auto reduce = [&](const char* name, auto function, auto... device) {
    m.def(name, function, "keys"_a, "order"_a, "grad"_a, "dweight"_a, "count"_a, "hidden"_a,
          "vocab_rows"_a, "grad_dtype"_a, "dweight_dtype"_a, "accumulate"_a, device...,
          VLMK_NO_GIL);
  };
  forward("embedding_forward", on_cpu(embedding_params, embedding_forward));
  add("embedding_add", on_cpu(embedding_add_params, embedding_add));
  gather("embedding_gather", on_cpu(embedding_gather_params, embedding_gather));
  m.def("embedding_sort", on_cpu(embedding_sort_params, embedding_sort), "ids"_a, "visual_index"_a,
        "keys"_a, "order"_a, "first"_a, "rows"_a, "vocab_start"_a, "vocab_rows"_a, "padding_idx"_a,
        VLMK_NO_GIL);
  reduce("embedding_reduce", on_cpu(embedding_reduce_params, embedding_reduce));
#ifdef VLMKERNELS_WITH_CUDA
  forward("embedding_forward_cuda", on_cuda(embedding_params, embedding_forward_cuda), "stream"_a);
  add("embedding_add_cuda", on_cuda(embedding_add_params, embedding_add_cuda), "stream"_a);
  gather("embedding_gather_cuda", on_cuda(embedding_gather_params, embedding_gather_cuda),
         "stream"_a);
  reduce("embedding_reduce_cuda", on_cuda(embedding_reduce_params, embedding_reduce_cuda),
         "stream"_a);
#endif
}

}  // namespace vlmk
