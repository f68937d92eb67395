"""SHA-256 of the task files that SentEval's scripts make: results on other ones are not comparable unsaid."""

DIGESTS = {
    "downstream/CR/custrev.neg": "ec94532766f6f962094841ab3bee2ad6f232f996c3756825a91e78bcc294750f",
    "downstream/CR/custrev.pos": "91a20a4ffeb5d38a39a4087bb247e16538aff21e7d621ae59738379f39f21732",
    "downstream/MPQA/mpqa.neg": "8da6e035fa4cea02f0555091096b29a6b3995ff0adf41fad25008dcee066b79e",
    "downstream/MPQA/mpqa.pos": "7487dbb74c77383e60b292845495163a9e21fb70a4fdacdda933413e43163f0d",
    "downstream/MR/rt-polarity.neg": "c4ac36eaa8adc8ee31c31f69594bfbe68d83ef5b6db53f1f19b28c0be52f3999",
    "downstream/MR/rt-polarity.pos": "34e5b0da2d491e46b700b00afe735aaae0962bcfe4f7f22b2d8077e714fa370f",
    "downstream/MRPC/msr_paraphrase_test.txt": "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
    "downstream/MRPC/msr_paraphrase_train.txt": "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
    "downstream/SUBJ/subj.objective": "d8ccd43f1674f1c17e4ab717564e3561cfb719b0db4cfb19e5677427c68ff8a1",
    "downstream/SUBJ/subj.subjective": "274c2ffe59c204dc4df779848561786f59a98cc20dda3cfdd7d9f76a4f730710",
    "downstream/TREC/TREC_10.label": "86ad53c8fc9d397ab2f4be7c967d8efb470b260140557d3e57afad69d1b88b76",
    "downstream/TREC/train_5500.label": "8bd6e79493f43bbd22c364587366a1dced54e1e31259eaa92721a0f526031116",
}
