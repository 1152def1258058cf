# Images of the release, both kinds in one repository: TAG is the CPU image, TAG-cuda the CUDA image. A tag means one image for ever, so a
# rollback runs what ran.

resource "aws_ecr_repository" "serve_app" {
  name                 = "${var.name}/serve-app"
  image_tag_mutability = "IMMUTABLE"

  image_scanning_configuration {
    scan_on_push = true
  }

  encryption_configuration {
    encryption_type = "AES256"
  }
}

resource "aws_ecr_lifecycle_policy" "serve_app" {
  repository = aws_ecr_repository.serve_app.name
  policy = jsonencode({
    rules = [
      {
        rulePriority = 1
        description  = "Parts of pushes that never ended"
        selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 7 }
        action       = { type = "expire" }
      },
      {
        rulePriority = 2
        description  = "Old releases"
        selection    = { tagStatus = "tagged", tagPatternList = ["*"], countType = "imageCountMoreThan", countNumber = var.kept_images }
        action       = { type = "expire" }
      },
    ]
  })
}
