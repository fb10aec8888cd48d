"""Whose kernel is it? Names that libraries gave to their kernels, beside names that people gave to theirs.

CUBLAS, CUDNN: read by `strings` and c++filt out of the libraries of nvidia-cublas 13.10.0.20 and nvidia-cudnn-cu13
9.28.1.4, cut where dots stand. Neither holds a kernel whose name begins with ada_, hopper_, blackwell_, sm100_xmma or
sm120_xmma. PUBLISHED: from profiles and sources that people put on GitHub; those of sm100_xmma and sm120_xmma stand in
somebody's tests.
MADE_UP: by us.
"""

import queue
import threading
from types import SimpleNamespace

import forks_with_torch
import pytest
import torch
from kernelopt.worker import tracing

CUBLAS = """
ampere_sgemm_128x64_nn
ampere_sgemm_fp16_32x32_sliced1x4_tn
ampere_bf16_s16816gemm_bf16_256x64_ldg8_f2f_nn
ampere_h16816gemm_256x64_ldg8_relu_stages_64x3_nn
turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_stages_32x1_nt
volta_s884gemm_fp16_256x64_ldg8_nn
volta_fp16_s884gemm_fp16_64x64_sliced1x4_ldg8_f2f_tn
volta_zgemm_64x32_cc
ampere_gcgemm_int8_32x32_cc
ampere_igemm_int8_128x128_ldg4_tn
sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_aligna4_alignc4_ex...
sm80_xmma_gemm_f16f16_f32f32_f32_tt_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma_aligna2_alignc2
sm89_xmma_gemm_e4m3e5m2bf16_e4m3e5m2f32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x32
sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cgasize1x1x1_warpgroupsize1x1x1_aligna2_alignc2
sm90_xmma_trmm_out_place_u_l_n_cf32cf32_f32f32_cf32_cn_n_tilesize32x32x8_stage3_warpsize2x2x1_ffma_a...
sm90_xmma_syrk_l_f64f64_f64f64_f64_nt_n_tilesize64x64x32_stage3_warpsize2x2x1_tensor16x8x16
cutlass3x_sm100_tensorop_s128x64x32gemm_e5m2_e4m3_f32_f32_f32_128x64x128_1x1x1_0_tnn_align4_1sm_bias_bf16_relu...
cutlass3x_sm100_bstensorop_s256x128x32gemm_block_scaled_ue8m0xf8_ue8m0xf8_f32_f16_f16_256x128x128_0_tnn_align1...
cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_32x64x16_1x1x1_3_tnn_align1_bias_f32_relu
cutlass3x_sm103_bstensorop_s256x128x96gemm_block_scaled_ue4m3xe2m1_ue4m3xe2m1_f32_bf16_bf16_256x128x768_0_tnn_...
cutlass3x_sm120_bstensorop_s16832gemm_block_scaled_ue8m0xe5m2_ue8m0xe4m3_f32_bf16_bf16_128x128x128_1x1x1_0_tnn...
cublasLt_fused_imma_dgemm_kernel_sm90
void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_dgelu_bf16_64x128_64x6_nt_align8>(cutlass_...
void cutlass::Kernel2<cutlass_75_wmma_tensorop_h161616gemm_32x32_128x1_tn_align1>(cutlass_75_wmma_te...
void cutlass::Kernel2<cutlass_80_tensorop_z884trmm_right_lower_nonunit_128x64_16x3_hn_align1>(cutlas...
void cutlass::Kernel2<cutlass_100_simt_cgemm_32x64_16x4_hh_align1>(cutlass_100_simt_cgemm_32x64_16x4...
void cutlass::Kernel<cutlass_80_tensorop_d884gemm_forwardCompat_grouped_64x64_16x4_align1>(cutlass_8...
void cublasLt::splitKreduce_kernel<8, 32, int, float, __half, float, __half, true, float, __half, __...
void gemmSN_NN_kernel_64addr<float, 128, 2, 4, 8, 7, 4, cublasGemvTensorBatched<__half const>, cubla...
void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, true, cublasGemvP...
void gemvNSP_kernel<double, double, double, double, 11, 1, 4, 1024, false, cublasGemvParamsEx<int, c...
void gemmk1_kernel<long, double, 256, 5, false, false, false, false, cublasGemvTensorBatched<double ...
void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorBatched<float const>, cublasGemvTenso...
void xmma::gemm::kernel_blasl3<xmma::gemm::Kernel_triangular_output_traits<xmma::Ampere_ffma_cp32_tr...
"""
CUDNN = """
ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile244t_nt_v1
_5x_cudnn_ampere_scudnn_128x128_stridedB_xregs_large_nn_v1
volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_large_nhwc2nchw_tn_v1
turing_h1688cudnn_256x128_ldg8_relu_exp_small_nhwc_tn_v1
sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x256x32_stage3_warpsize2x4x1_g1_tenso...
sm90_xmma_wgrad_indexed_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize64x64x64_warpgroupsize1x1x1_g1_e...
cutlass3x_sm100_tensorop_s128x256x16implicit_gemm_strided_dgrad_f16_f16_f32_f16_f16_f32_128x256x64_8w8h2d1n_dy...
cudnn_causal_conv1d_nwh_bwd_sp_k
cutlass_sm100_simt_implicit_gemm_wgrad_f32f32_f32f32_f32_ndhwcndhwc_ndhwc_tilesize128x128x8_stage4_warpsize4x2...
void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816wgrad_optimized_f16_256x128_64x3_nhwc_alig...
void xmma__5x_cudnn::gemm::warp_specialized_kernel_gmma_utmaldg<xmma__5x_cudnn::implicit_gemm::dgrad...
void cudnn::ops::softmax_fw_kernel_resident<2, double, double, 256, 0, 0, 0, 224, 192>(cudnnTensorSt...
void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, long, 1024, 5, 5, 3, 3, 3, 0, false, fals...
void RNN_persist_fp<float, __half, float, (cudnnRNNMode_t)0, false, 1024, 1, 2, 2, 64, 0, 64, 2, 2, ...
"""
PUBLISHED = """
nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT
nvjet_sm100_tst_32x64_64x16_4x2_2cta_h_bz_splitK_bias_TNN
cudnn_generated_oss_sdpa_sm100_flash_fprop_f16_knob_7_128x128x128_4x1x1_cga1x1x1_kernel0_0
volta_scudnn_128x32_relu_medium_nn_v1
maxwell_scudnn_128x128_stridedB_splitK_interior_nn
cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_64x32x16_1x1x1_3_tnn_align1_bias_f32_relu
cutlass3x_sm120_bstensorop_s16864gemm_block_scaled_ue4m3xe2m1_ue4m3xe2m1_f32_bf16_bf16_128x128x256_1x1x1_0_tnn...
sm100_xmma_gemm_bf16f16_bf16f16_bf16f32_tn_n_tilesize256x128x64_stage4_warpsize2x2x1
sm120_xmma_gemm_e2m1_e2m1
Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_CMS_SN_LDSB0
Custom_Cijk_Ailk_Bjlk_S_MX_B_BIAS_HA_S_SAV_NTD_SK3_UserArgs_MT256x256x32_MI16x16x1_shortname0_gfx950
"""
TORCH = """
void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel>
void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>(...)
void pytorch_flash::flash_fwd_kernel<...>(...)
fmha_cutlassF_bf16_aligned_64x128_rf_sm80(...)
triton_per_fused__softmax_0
"""
OWN = """
softmax_kernel
_attn_fwd
matmul_kernel_tma_persistent
void scale<float>(float const*, float*)
kernel_cutlass_add_kernel_0
kernel_cutlass_kernel_flashinfernormkernelsrmsnormRMSNormKernel_object_at__tensorptrbf16gmemalign128oi64409640961
void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, cutlass::gem...
void cutlass::Kernel2<cutlass::gemm::kernel::GemmUniversal<...>>(...)
void cutlass::Kernel<cutlass::conv::kernel::ImplicitGemmConvolution<...>>(...)
void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<...>>>(...)
void deep_gemm::sm90_fp8_gemm_1d2d_impl<128u, 7168u>(...)
void deep_gemm::sm100_fp8_gemm_1d1d_impl<...>(...)
hopper_sgemm_kernel(int, int, int, float, float const*)
_w8a8_block_fp8_matmul
"""
MADE_UP = """
ada_softmax
ada_rmsnorm_kernel
blackwell_gemm_kernel
blackwell_fp8_gemm_128x256
hopper_gemm
hopper_gemm_kernel_128x128_nn
ampere_flash_attention
ampere_sgemm
turing_gemm_v2
volta_sgemm_tiled
sm90_gemm_ws
sm100_gemm_tcgen05
sm120_mma_kernel
sm90_xmmadd
cutlass_gemm
cutlass_style_tensorop
cutlass3x_like_gemm
gemv2_kernel
gemv2_stage1
split_k_reduce_kernel
cublas_style_matmul
nvjets
Cij
dot_kernel
transpose_copy_kernel
cast_to_copy_fp8
triton_matmul
"""


def named(*texts: str) -> list[str]:
    return [name for text in texts for name in text.strip().splitlines()]


@pytest.mark.parametrize("name", named(CUBLAS, CUDNN, PUBLISHED, TORCH))
def test_a_librarys_kernel_is_known_by_its_name_alone(name):
    assert tracing.origin(name, set(), set()) == "library"


@pytest.mark.parametrize("name", named(OWN, MADE_UP))
def test_a_kernel_that_begins_like_one_is_its_authors(name):
    assert tracing.origin(name, set(), set()) == "own"


@pytest.mark.parametrize(
    "name",
    [
        "Memcpy DtoD (Device -> Device)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(...)>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::OpaqueType<2u>>",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy, at::native::memory::LoadWithCast<1>>",
        "triton_poi_fused__to_copy_0",
    ],
)
def test_what_moves_data_computes_nothing(name):
    assert tracing.origin(name, set(), set()) == "moving"


def test_what_torch_launched_is_its_own_whatever_the_name():
    assert tracing.origin("scale", {"scale"}, set()) == "library"
    assert tracing.origin("scale", set(), {"scale"}) == "moving"


@pytest.mark.skipif(tracing.all_threads() is None, reason="this torch profiles the thread that starts it alone")
def test_operators_of_other_threads_are_seen():
    waiting, go = threading.Event(), threading.Event()

    def product():
        waiting.set()
        go.wait(10)
        torch.ones(8, 8) @ torch.ones(8, 8)

    before = threading.Thread(target=product)
    before.start()
    waiting.wait(10)
    with tracing.profiling(of_threads=True) as profiler:
        go.set()
        before.join()
        meanwhile = threading.Thread(target=lambda: torch.relu(torch.ones(8)))
        meanwhile.start()
        meanwhile.join()
        torch.ones(4, 8).sum(0)
    operators = {event.name: event for event in profiler.events()}
    assert {"aten::mm", "aten::relu", "aten::sum"} <= operators.keys()
    assert list(operators["aten::sum"].input_shapes[0]) == [4, 8]


def test_what_torch_reduced_is_known_by_the_kernel():
    def event(name: str, shape: list[int], kernel: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, input_shapes=[shape], kernels=[SimpleNamespace(name=kernel)])

    events = [event("aten::sum", [4, 8], "reduce"), event("aten::mean", [2, 2], "reduce"), event("aten::mm", [9], "mm")]
    assert tracing.reduced_by_torch(events) == {"reduce": 32}


@pytest.mark.gpu
def test_a_product_that_a_thread_launches_is_the_librarys():
    a = torch.randn(256, 256, device="cuda")
    jobs: queue.Queue = queue.Queue()
    threading.Thread(target=lambda: [job() for job in iter(jobs.get, None)], daemon=True).start()

    def call():
        done = threading.Event()
        jobs.put(lambda: (torch.sort(a.sin()), a @ a, done.set()))
        done.wait(10)
        a.sum(0)

    for _ in range(2):
        kernels = tracing.kernels_of(call)
    jobs.put(None)
    assert kernels and all(kernel.origin != "own" for kernel in kernels), kernels
    assert 256 * 256 in [kernel.reduces for kernel in kernels]


def test_the_profiler_starts_without_torch_dynamo():
    """In a process of its own: others of this suite have loaded it. What torch has is there again afterwards."""
    code = """if True:
        import sys, torch
        from kernelopt.worker import tracing
        with tracing.profiling() as profiler:
            torch.ones(8).sum()
        assert any(event.name == "aten::sum" for event in profiler.events())
        assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules
        assert torch._inductor.config
    """
    done = forks_with_torch.run(code)
    assert done.returncode == 0, done.stdout
