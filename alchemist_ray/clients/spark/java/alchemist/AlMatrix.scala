package alchemist

import org.apache.spark.mllib.linalg.distributed.{
  BlockMatrix, CoordinateMatrix, IndexedRowMatrix, RowMatrix}
import org.apache.spark.sql.DataFrame

/** A matrix on a gang. Its elements stay there until the program asks for them.
  *
  * The matrix is freed by `free`, or some time after the program has dropped the object.
  *
  * @param context what sent or computed it: a wrapper calls its routine by `context.run`
  * @param dtype NumPy's name: "float64", ...
  * @param layout its distribution over the ranks, as Elemental names it
  */
final class AlMatrix private[alchemist] (
    val context: AlchemistContext,
    private[alchemist] val id: Long,
    val name: String,
    val numRows: Long,
    val numCols: Long,
    val dtype: String,
    val layout: String) {

  // Each is lazy: Spark's tasks fetch the rows at each use, so cache what is used twice.

  def toIndexedRowMatrix(): IndexedRowMatrix =
    context.receive(this, "IndexedRowMatrix").asInstanceOf[IndexedRowMatrix]

  def toRowMatrix(): RowMatrix = context.receive(this, "RowMatrix").asInstanceOf[RowMatrix]

  def toBlockMatrix(): BlockMatrix = context.receive(this, "BlockMatrix").asInstanceOf[BlockMatrix]

  def toCoordinateMatrix(): CoordinateMatrix =
    context.receive(this, "CoordinateMatrix").asInstanceOf[CoordinateMatrix]

  def toDataFrame(): DataFrame = context.receive(this, "DataFrame").asInstanceOf[DataFrame]

  /** Free the gang's memory. Objects of Spark that were made of this matrix fail afterwards. */
  def free(): Unit = context.free(id)

  override def toString: String = s"AlMatrix $name, $numRows x $numCols, $dtype, $layout"
}

/** Sends matrices to the gang of the current context; missing rows and blocks are zero. */
object AlMatrix {
  def apply(matrix: RowMatrix): AlMatrix = AlchemistContext.current.send("RowMatrix", matrix)

  def apply(matrix: IndexedRowMatrix): AlMatrix =
    AlchemistContext.current.send("IndexedRowMatrix", matrix)

  def apply(matrix: BlockMatrix): AlMatrix =
    AlchemistContext.current.send(
      "BlockMatrix", matrix, matrix.rowsPerBlock, matrix.colsPerBlock)

  def apply(matrix: CoordinateMatrix): AlMatrix =
    AlchemistContext.current.send("CoordinateMatrix", matrix)

  /** Rows in the order of the DataFrame's partitions. */
  def apply(frame: DataFrame): AlMatrix = AlchemistContext.current.send("DataFrame", frame)
}
