// Made by crc32_kernel.py from crc32_kernel.h with NVRTC 12.9; do not edit. The kernel in
// the assembly language that every driver since CUDA 9 compiles for its GPU.
#pragma once

namespace fastckpt {

inline constexpr char kCrc32Ptx[] = R"ptx(.version 6.0
.target sm_60
.address_size 64
.visible .entry fastckpt_crc32( .param .align 8 .b8 fastckpt_crc32_param_0[3096] ) .maxntid 256, 1,
1 { .reg .pred %p<27>; .reg .b32 %r<304>; .reg .b64 %rd<187>; .shared .align 4 .b8
_ZZ14fastckpt_crc32E6shared[5120]; mov.b64 %rd26, fastckpt_crc32_param_0; mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x; add.s64 %rd2, %rd26, 16; mov.u64 %rd181, 0; ld.param.u32 %r258,
[fastckpt_crc32_param_0+16]; setp.lt.u32 %p1, %r258, 2; @%p1 bra $L__BB0_4; mov.u32 %r259, 0;
$L__BB0_2: add.s32 %r96, %r258, %r259; shr.u32 %r97, %r96, 1; mul.wide.u32 %rd28, %r97, 24; add.s64
%rd29, %rd26, %rd28; ld.param.u32 %r98, [%rd29+40]; setp.le.u32 %p2, %r98, %r2; selp.b32 %r259,
%r97, %r259, %p2; selp.b32 %r258, %r258, %r97, %p2; sub.s32 %r99, %r258, %r259; setp.gt.u32 %p3,
%r99, 1; @%p3 bra $L__BB0_2; cvt.u64.u32 %rd181, %r259; $L__BB0_4: mul.lo.s64 %rd30, %rd181, 24;
add.s64 %rd31, %rd26, %rd30; ld.param.u64 %rd5, [%rd31+24]; and.b64 %rd32, %rd5, -16; ld.param.u32
%r8, [%rd31+40]; sub.s32 %r104, %r2, %r8; mul.wide.u32 %rd33, %r104, 65536; add.s64 %rd34, %rd33,
%rd32; add.s64 %rd35, %rd34, 65536; ld.param.u64 %rd6, [%rd31+32]; ld.param.u64 %rd36, [%rd2+-16];
cvta.to.global.u64 %rd37, %rd36; mul.wide.u32 %rd38, %r1, 4; add.s64 %rd39, %rd37, %rd38;
ld.global.u32 %r105, [%rd39]; mov.u64 %rd40, _ZZ14fastckpt_crc32E6shared; add.s64 %rd41, %rd40,
%rd38; st.shared.u32 [%rd41], %r105; ld.global.u32 %r106, [%rd39+1024]; st.shared.u32 [%rd41+1024],
%r106; ld.global.u32 %r107, [%rd39+2048]; st.shared.u32 [%rd41+2048], %r107; ld.global.u32 %r108,
[%rd39+3072]; st.shared.u32 [%rd41+3072], %r108; max.u64 %rd7, %rd34, %rd5; min.u64 %rd42, %rd35,
%rd6; bar.sync 0; and.b64 %rd8, %rd7, -16; and.b64 %rd43, %rd42, 68719476720; sub.s64 %rd44, %rd43,
%rd8; shr.u64 %rd45, %rd44, 4; cvt.u32.u64 %r109, %rd45; add.s32 %r110, %r109, 255; shr.u32 %r111,
%r110, 8; and.b32 %r112, %r110, -256; sub.s32 %r9, %r112, %r109; setp.eq.s32 %p4, %r111, 0;
setp.lt.u32 %p5, %r1, %r9; mov.u32 %r285, 0; or.pred %p6, %p4, %p5; mov.u32 %r264, %r285; mov.u32
%r265, %r285; mov.u32 %r266, %r285; mov.u32 %r267, %r285; @%p6 bra $L__BB0_10; sub.s32 %r113, %r1,
%r9; mul.wide.u32 %rd46, %r113, 16; add.s64 %rd9, %rd46, %rd8; setp.gt.u64 %p7, %rd7, %rd9; @%p7 bra
$L__BB0_7; bra.uni $L__BB0_6; $L__BB0_7: sub.s64 %rd184, %rd7, %rd9; setp.gt.u64 %p8, %rd184, 15;
mov.u32 %r264, 0; mov.u32 %r265, %r264; mov.u32 %r266, %r264; mov.u32 %r267, %r264; @%p8 bra
$L__BB0_10; sub.s32 %r131, %r109, %r112; add.s32 %r132, %r1, %r131; mul.wide.u32 %rd60, %r132, 16;
sub.s64 %rd61, %rd7, %rd60; sub.s64 %rd183, %rd61, %rd8; mov.u32 %r267, 0; mov.u64 %rd182, %rd7;
mov.u32 %r266, %r267; mov.u32 %r265, %r267; mov.u32 %r264, %r267; $L__BB0_9: .pragma "nounroll";
ld.u8 %r133, [%rd182]; cvt.u32.u64 %r134, %rd184; shl.b32 %r135, %r134, 3; and.b32 %r136, %r135, 24;
shl.b32 %r137, %r133, %r136; and.b64 %rd62, %rd184, -4; setp.eq.s64 %p9, %rd62, 0; selp.b32 %r138,
%r137, 0, %p9; or.b32 %r264, %r138, %r264; setp.eq.s64 %p10, %rd62, 4; selp.b32 %r139, %r137, 0,
%p10; or.b32 %r265, %r139, %r265; setp.eq.s64 %p11, %rd62, 8; selp.b32 %r140, %r137, 0, %p11; or.b32
%r266, %r140, %r266; setp.eq.s64 %p12, %rd62, 12; selp.b32 %r141, %r137, 0, %p12; or.b32 %r267,
%r141, %r267; add.s64 %rd184, %rd184, 1; add.s64 %rd182, %rd182, 1; add.s64 %rd183, %rd183, 1;
setp.lt.u64 %p13, %rd183, 16; @%p13 bra $L__BB0_9; bra.uni $L__BB0_10; $L__BB0_6: ld.v4.u32 {%r264,
%r265, %r266, %r267}, [%rd9]; $L__BB0_10: and.b64 %rd70, %rd7, 68719476720; sub.s64 %rd71, %rd43,
%rd70; shr.u64 %rd72, %rd71, 4; cvt.u32.u64 %r147, %rd72; add.s32 %r148, %r147, 255; shr.u32 %r149,
%r148, 8; setp.eq.s32 %p14, %r149, 0; mov.u32 %r286, %r285; mov.u32 %r287, %r285; mov.u32 %r288,
%r285; @%p14 bra $L__BB0_15; and.b32 %r158, %r148, -256; sub.s32 %r159, %r158, %r147; shr.u64 %rd83,
%rd7, 4; cvt.u64.u32 %rd84, %r1; add.s64 %rd85, %rd83, %rd84; shl.b64 %rd86, %rd85, 4; add.s64
%rd87, %rd86, 4096; mul.wide.u32 %rd88, %r159, 16; sub.s64 %rd185, %rd87, %rd88; mov.u32 %r276, 1;
mov.u32 %r285, 0; mov.u32 %r286, %r285; mov.u32 %r287, %r285; mov.u32 %r288, %r285; mov.u32 %r281,
%r264; mov.u32 %r282, %r265; mov.u32 %r283, %r266; mov.u32 %r284, %r267; $L__BB0_12: .pragma
"nounroll"; setp.ge.u32 %p15, %r276, %r149; @%p15 bra $L__BB0_14; ld.v4.u32 {%r281, %r282, %r283,
%r284}, [%rd185]; $L__BB0_14: shl.b32 %r169, %r285, 2; cvt.u64.u32 %rd99, %r169; and.b64 %rd100,
%rd99, 1020; add.s64 %rd102, %rd40, %rd100; add.s64 %rd103, %rd40, 1024; shr.u32 %r170, %r285, 6;
cvt.u64.u32 %rd104, %r170; and.b64 %rd105, %rd104, 1020; add.s64 %rd106, %rd103, %rd105;
ld.shared.u32 %r171, [%rd106]; ld.shared.u32 %r172, [%rd102]; xor.b32 %r173, %r171, %r172; add.s64
%rd107, %rd40, 2048; shr.u32 %r174, %r285, 14; cvt.u64.u32 %rd108, %r174; and.b64 %rd109, %rd108,
1020; add.s64 %rd110, %rd107, %rd109; ld.shared.u32 %r175, [%rd110]; xor.b32 %r176, %r173, %r175;
shr.u32 %r177, %r285, 24; add.s64 %rd111, %rd40, 3072; mul.wide.u32 %rd112, %r177, 4; add.s64
%rd113, %rd111, %rd112; ld.shared.u32 %r178, [%rd113]; xor.b32 %r179, %r176, %r178; xor.b32 %r285,
%r179, %r264; shl.b32 %r180, %r286, 2; cvt.u64.u32 %rd114, %r180; and.b64 %rd115, %rd114, 1020;
add.s64 %rd116, %rd40, %rd115; shr.u32 %r181, %r286, 6; cvt.u64.u32 %rd117, %r181; and.b64 %rd118,
%rd117, 1020; add.s64 %rd119, %rd103, %rd118; ld.shared.u32 %r182, [%rd119]; ld.shared.u32 %r183,
[%rd116]; xor.b32 %r184, %r182, %r183; shr.u32 %r185, %r286, 14; cvt.u64.u32 %rd120, %r185; and.b64
%rd121, %rd120, 1020; add.s64 %rd122, %rd107, %rd121; ld.shared.u32 %r186, [%rd122]; xor.b32 %r187,
%r184, %r186; shr.u32 %r188, %r286, 24; mul.wide.u32 %rd123, %r188, 4; add.s64 %rd124, %rd111,
%rd123; ld.shared.u32 %r189, [%rd124]; xor.b32 %r190, %r187, %r189; xor.b32 %r286, %r190, %r265;
shl.b32 %r191, %r287, 2; cvt.u64.u32 %rd125, %r191; and.b64 %rd126, %rd125, 1020; add.s64 %rd127,
%rd40, %rd126; shr.u32 %r192, %r287, 6; cvt.u64.u32 %rd128, %r192; and.b64 %rd129, %rd128, 1020;
add.s64 %rd130, %rd103, %rd129; ld.shared.u32 %r193, [%rd130]; ld.shared.u32 %r194, [%rd127];
xor.b32 %r195, %r193, %r194; shr.u32 %r196, %r287, 14; cvt.u64.u32 %rd131, %r196; and.b64 %rd132,
%rd131, 1020; add.s64 %rd133, %rd107, %rd132; ld.shared.u32 %r197, [%rd133]; xor.b32 %r198, %r195,
%r197; shr.u32 %r199, %r287, 24; mul.wide.u32 %rd134, %r199, 4; add.s64 %rd135, %rd111, %rd134;
ld.shared.u32 %r200, [%rd135]; xor.b32 %r201, %r198, %r200; xor.b32 %r287, %r201, %r266; shl.b32
%r202, %r288, 2; cvt.u64.u32 %rd136, %r202; and.b64 %rd137, %rd136, 1020; add.s64 %rd138, %rd40,
%rd137; shr.u32 %r203, %r288, 6; cvt.u64.u32 %rd139, %r203; and.b64 %rd140, %rd139, 1020; add.s64
%rd141, %rd103, %rd140; ld.shared.u32 %r204, [%rd141]; ld.shared.u32 %r205, [%rd138]; xor.b32 %r206,
%r204, %r205; shr.u32 %r207, %r288, 14; cvt.u64.u32 %rd142, %r207; and.b64 %rd143, %rd142, 1020;
add.s64 %rd144, %rd107, %rd143; ld.shared.u32 %r208, [%rd144]; xor.b32 %r209, %r206, %r208; shr.u32
%r210, %r288, 24; mul.wide.u32 %rd145, %r210, 4; add.s64 %rd146, %rd111, %rd145; ld.shared.u32
%r211, [%rd146]; xor.b32 %r212, %r209, %r211; xor.b32 %r288, %r212, %r267; add.s64 %rd185, %rd185,
4096; add.s32 %r276, %r276, 1; setp.le.u32 %p16, %r276, %r149; mov.u32 %r264, %r281; mov.u32 %r265,
%r282; mov.u32 %r266, %r283; mov.u32 %r267, %r284; @%p16 bra $L__BB0_12; $L__BB0_15: mov.u32 %r289,
0; $L__BB0_16: .pragma "nounroll"; and.b32 %r219, %r285, 1; neg.s32 %r220, %r219; and.b32 %r221,
%r220, -306674912; shr.u32 %r222, %r285, 1; xor.b32 %r285, %r221, %r222; add.s32 %r289, %r289, 1;
setp.ne.s32 %p17, %r289, 32; @%p17 bra $L__BB0_16; xor.b32 %r292, %r286, %r285; mov.u32 %r291, 0;
$L__BB0_18: .pragma "nounroll"; and.b32 %r224, %r292, 1; neg.s32 %r225, %r224; and.b32 %r226, %r225,
-306674912; shr.u32 %r227, %r292, 1; xor.b32 %r292, %r226, %r227; add.s32 %r291, %r291, 1;
setp.ne.s32 %p18, %r291, 32; @%p18 bra $L__BB0_18; xor.b32 %r294, %r287, %r292; mov.u32 %r293, 0;
$L__BB0_20: .pragma "nounroll"; and.b32 %r229, %r294, 1; neg.s32 %r230, %r229; and.b32 %r231, %r230,
-306674912; shr.u32 %r232, %r294, 1; xor.b32 %r294, %r231, %r232; add.s32 %r293, %r293, 1;
setp.ne.s32 %p19, %r293, 32; @%p19 bra $L__BB0_20; xor.b32 %r296, %r288, %r294; ld.param.u64 %rd158,
[%rd26]; cvta.to.global.u64 %rd159, %rd158; add.s64 %rd161, %rd159, %rd38; ld.global.u32 %r297,
[%rd161+4096]; mov.u32 %r295, 0; mov.u32 %r298, %r295; $L__BB0_22: .pragma "nounroll"; shr.s32
%r235, %r296, 31; and.b32 %r236, %r235, %r297; xor.b32 %r298, %r236, %r298; shl.b32 %r296, %r296, 1;
and.b32 %r237, %r297, 1; neg.s32 %r238, %r237; and.b32 %r239, %r238, -306674912; shr.u32 %r240,
%r297, 1; xor.b32 %r297, %r239, %r240; add.s32 %r295, %r295, 1; setp.ne.s32 %p20, %r295, 32; @%p20
bra $L__BB0_22; st.shared.u32 [%rd41+4096], %r298; mov.u32 %r299, 128; $L__BB0_24: .pragma
"nounroll"; bar.sync 0; setp.ge.u32 %p21, %r1, %r299; @%p21 bra $L__BB0_26; add.s32 %r244, %r299,
%r1; mul.wide.u32 %rd165, %r244, 4; add.s64 %rd167, %rd40, %rd165; ld.shared.u32 %r245,
[%rd41+4096]; ld.shared.u32 %r246, [%rd167+4096]; xor.b32 %r247, %r245, %r246; st.shared.u32
[%rd41+4096], %r247; $L__BB0_26: shr.u32 %r299, %r299, 1; setp.ne.s32 %p22, %r299, 0; @%p22 bra
$L__BB0_24; bar.sync 0; setp.ne.s32 %p23, %r1, 0; @%p23 bra $L__BB0_33; ld.shared.u32 %r300,
[_ZZ14fastckpt_crc32E6shared+4096]; and.b64 %rd174, %rd42, -16; max.u64 %rd186, %rd174, %rd7;
setp.ge.u64 %p24, %rd186, %rd42; @%p24 bra $L__BB0_32; $L__BB0_29: .pragma "nounroll"; ld.u8 %r252,
[%rd186]; xor.b32 %r300, %r300, %r252; mov.u32 %r301, 0; $L__BB0_30: .pragma "nounroll"; and.b32
%r253, %r300, 1; neg.s32 %r254, %r253; and.b32 %r255, %r254, -306674912; shr.u32 %r256, %r300, 1;
xor.b32 %r300, %r255, %r256; add.s32 %r301, %r301, 1; setp.ne.s32 %p25, %r301, 8; @%p25 bra
$L__BB0_30; add.s64 %rd186, %rd186, 1; setp.lt.u64 %p26, %rd186, %rd42; @%p26 bra $L__BB0_29;
$L__BB0_32: ld.param.u64 %rd177, [%rd26+8]; cvta.to.global.u64 %rd178, %rd177; mul.wide.u32 %rd179,
%r2, 4; add.s64 %rd180, %rd178, %rd179; st.global.u32 [%rd180], %r300; $L__BB0_33: ret; }
)ptx";

}  // namespace fastckpt
